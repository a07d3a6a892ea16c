"""`raysonar generate` and `raysonar trace`: answer prompts here and now."""

import argparse
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from raysonar.cli.options import (
    Commands,
    add_chat_options,
    add_dry_run,
    add_engine_options,
    add_sampling_options,
    dry_run,
    engine_config,
    read_text,
    refuse_without_dry_run,
    sampling_values,
)
from raysonar.cli.output import Figures, in_order, write_json, write_text
from raysonar.driver.params import CONTINUATION
from raysonar.errors import ConfigurationError
from raysonar.grammar import Grammar

if TYPE_CHECKING:
    from raysonar.driver.engine import Engine
    from raysonar.driver.params import SamplingParams


def add_generate(commands: Commands) -> None:
    """The commands `generate` and `trace`."""
    generate = commands.add_parser(
        "generate",
        help="answer prompts here and now",
        description="Answer prompts. The text goes to stdout, figures and errors to stderr.",
    )
    generate.set_defaults(run=_generate, output=None)
    _add_generate_options(generate)
    add_dry_run(generate)

    trace = commands.add_parser(
        "trace",
        help="answer prompts and show where the time goes",
        description="Answer prompts as generate does, and write what every rank did in every step as a Chrome trace, "
        "which Perfetto (ui.perfetto.dev) shows.",
    )
    trace.set_defaults(run=_generate, dry_run=False, device_memory=None)
    trace.add_argument("--output", metavar="FILE", required=True, help="the trace, JSON")
    _add_generate_options(trace)


def _add_generate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="FOLDER", help="a Hugging Face folder (default: the bundled demo model)")
    source = parser.add_argument_group("prompts").add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    source.add_argument(
        "--input", metavar="FILE", default="-", help="a file with one prompt a line (default: -, the standard input)"
    )
    add_chat_options(parser)
    shape = add_sampling_options(parser).add_mutually_exclusive_group()
    shape.add_argument("--json-schema", metavar="FILE", help="the answer is JSON that is valid under this schema")
    shape.add_argument("--regex", metavar="PATTERN", help="the answer as a whole matches this")
    add_engine_options(parser)
    parser.add_argument("--json", action="store_true", help="print an object a prompt, then one with the figures")


def _generate(options: argparse.Namespace) -> None:
    from raysonar.driver.engine import Engine
    from raysonar.driver.params import SamplingParams
    from raysonar.ranks.start import start_ranks

    params = SamplingParams(**{"temperature": 0.0, **sampling_values(options), "grammar": _grammar(options)})
    config = engine_config(options)
    if options.dry_run:
        return dry_run(config, options)
    refuse_without_dry_run(options, "device_memory")
    prompts = options.prompt or _read_prompts(options.input)
    start = partial(start_ranks, progress=sys.stderr is not None and sys.stderr.isatty())
    with Engine(config, start=start) as engine, engine.trace(options.output) if options.output else nullcontext():
        inputs, each = _inputs(engine, prompts, params, options.chat)
        figures = Figures()
        write = write_json if options.json else write_text
        write(prompts, in_order(figures.of(engine.generate_stream(inputs, each))))
    if options.output:
        print(f"[trace in {options.output}: open it at ui.perfetto.dev or chrome://tracing]", file=sys.stderr)
    if options.json:
        print(json.dumps({"summary": figures.json()}))
    else:
        sys.stdout.flush()
        print(figures.text(), file=sys.stderr)
    return None


def _grammar(options: argparse.Namespace) -> Grammar | None:
    """What the answers must match."""
    if options.json_schema is not None:
        return Grammar.json_schema(read_text(options.json_schema, "the schema"), "json-schema")
    return None if options.regex is None else Grammar.regex(options.regex, "regex")


def _read_prompts(name: str) -> list[str]:
    """One prompt a line of a file, or of the standard input."""
    if name == "-" and (sys.stdin is None or sys.stdin.isatty()):
        raise ConfigurationError("no prompt: give --prompt TEXT, --input FILE, or prompts on the standard input")
    text = sys.stdin.read() if name == "-" else read_text(name, "prompts")
    prompts = [line for line in text.removeprefix("\ufeff").split("\n") if line.strip()]
    if not prompts:
        raise ConfigurationError(f"no prompt in {'the standard input' if name == '-' else name}")
    return prompts


def _inputs(
    engine: "Engine", prompts: list[str], params: "SamplingParams", chat: bool | None
) -> tuple[list[list[int]], list["SamplingParams"]]:
    """What the engine continues, the prompts or each as a user's message in the chat template; and how."""
    if chat or (chat is None and engine.tokenizer.has_chat_template):
        inputs = [engine.tokenizer.render_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
        return inputs, [params] * len(inputs)
    inputs = [engine.tokenizer.encode(prompt) for prompt in prompts]
    if params.max_tokens is not None:
        return inputs, [params] * len(inputs)
    room = [max(engine.max_length - len(tokens), 1) for tokens in inputs]
    return inputs, [replace(params, max_tokens=min(CONTINUATION, each)) for each in room]
