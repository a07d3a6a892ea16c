"""The command line: `raysonar generate`, `trace` and `serve`. Heavy imports wait until a command needs them."""

import argparse
import io
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysonar import demo
from raysonar.cli.output import Figures, in_order, write_json, write_text
from raysonar.errors import ConfigurationError, RaysonarError

if TYPE_CHECKING:
    from raysonar.config import EngineConfig
    from raysonar.driver.engine import Engine
    from raysonar.driver.params import SamplingParams

INTERRUPTED = 128 + signal.SIGINT
"""The shell's exit status of a program that Ctrl-C ended."""
FAILED = 2
CONTINUATION = 256
"""Tokens that a raw prompt is continued by unless told otherwise: it may have no end of its own."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status; errors are one line on stderr and status 2."""
    options = _parser().parse_args(arguments)
    try:
        if sys.stdout is None:
            raise ConfigurationError("the standard output is closed")
        options.run(options)
        sys.stdout.flush()
    except RaysonarError as error:
        print(f"raysonar: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:  # the reader has seen enough
        _discard_output()
    except OSError as error:
        _discard_output()
        print(f"raysonar: {error}", file=sys.stderr)
        return FAILED
    return 0


def _discard_output() -> None:
    """Let nothing more be flushed at exit into a standard output that takes no more."""
    with suppress(io.UnsupportedOperation):  # not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _port(text: str) -> int:
    port = int(text)
    if not 1 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"a port is a number from 1 to 65535, not {port}")
    return port


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="raysonar", description="Mixture-of-experts models with multi-token-prediction speculation."
    )
    parser.add_argument("--version", action="version", version=f"raysonar {version('raysonar')}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser(
        "generate",
        help="answer prompts here and now",
        description="Answer prompts. The text goes to stdout, figures and errors to stderr.",
    )
    generate.set_defaults(run=_generate, output=None)
    _add_generate_options(generate)
    _add_dry_run(generate)

    trace = commands.add_parser(
        "trace",
        help="answer prompts and show where the time goes",
        description="Answer prompts as generate does, and write what every rank did in every step as a Chrome trace, "
        "which Perfetto (ui.perfetto.dev) shows.",
    )
    trace.set_defaults(run=_generate, dry_run=False, device_memory=None)
    trace.add_argument("--output", metavar="FILE", required=True, help="the trace, JSON")
    _add_generate_options(trace)

    serve = commands.add_parser(
        "serve",
        help="serve OpenAI's HTTP API",
        description="Serve OpenAI's HTTP API on Ray Serve until Ctrl-C.",
    )
    serve.set_defaults(run=_serve)
    serve.add_argument("model", nargs="?", metavar="FOLDER", help="a Hugging Face folder (default: the demo model)")
    serve.add_argument("--host", default="127.0.0.1", help="where to listen (default: %(default)s, this machine only)")
    serve.add_argument("--port", type=_port, default=8000, help="(default: %(default)s)")
    serve.add_argument("--address", help="of a running Ray cluster (default: start a Ray of its own)")
    serve.add_argument("--model-name", help="what clients ask for (default: the folder's name)")
    _add_engine_options(serve)
    group = _add_dry_run(serve)
    group.add_argument(
        "--config", type=Path, metavar="FILE", help="size what `serve run FILE` would serve; other options override it"
    )
    group.add_argument("--json", action="store_true", help="print the sizes as an object")
    return parser


def _add_generate_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="FOLDER", help="a Hugging Face folder (default: the bundled demo model)")
    source = parser.add_argument_group("prompts").add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times")
    source.add_argument(
        "--input", metavar="FILE", default="-", help="a file with one prompt a line (default: -, the standard input)"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        help="take each prompt as a user's message (default: when the folder has a chat template)",
    )
    form.add_argument("--raw", action="store_false", dest="chat", help="the same as --no-chat: continue the prompt")
    _add_sampling_options(parser)
    _add_engine_options(parser)
    parser.add_argument("--json", action="store_true", help="print an object a prompt, then one with the figures")


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help=f"of an answer (default: until it ends in a chat, else {CONTINUATION}; at most the model's length)",
    )
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="(default: 0, the likeliest token)")
    group.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--top-k", type=int, metavar="K")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--presence-penalty", type=float, metavar="X")
    group.add_argument("--frequency-penalty", type=float, metavar="X")
    group.add_argument("--repetition-penalty", type=float, metavar="X")
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the answer; may be given several times")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="do not stop at end-of-sequence")


def _add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--speculative-tokens",
        type=int,
        metavar="K",
        help="draft tokens a step, 0 to 4 (default: 1 with an MTP module, else 0)",
    )
    group.add_argument(
        "--dtype",
        help="auto, float32, bfloat16 or float16 (default: auto, as stored; a small one on a CPU as float32)",
    )
    group.add_argument("--device", help="auto, cpu or cuda (default: auto)")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: torch's choice; 1 in serve)")
    group.add_argument("--max-model-len", type=int, metavar="N", help="tokens of prompt and answer (default: all)")
    group.add_argument("--max-running", type=int, metavar="N", help="requests that run at once (default: 64)")
    group.add_argument("--token-budget", type=int, metavar="N", help="tokens a step at the most (default: 1024)")
    group.add_argument("--tensor-parallel", type=int, metavar="T", help="ranks that share attention (default: 1)")
    group.add_argument("--data-parallel", type=int, metavar="P", help="rows of ranks, T x P in all (default: 1)")
    group.add_argument(
        "--micro-batching", choices=("never", "always"), help="run steps as two overlapping halves (default: never)"
    )


def _add_dry_run(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    group = parser.add_argument_group("dry run")
    group.add_argument(
        "--dry-run",
        action="store_true",
        help="print what each rank would hold, and end; status 2 if it does not fit. A folder without weights will do",
    )
    group.add_argument(
        "--device-memory",
        type=_bytes,
        metavar="BYTES",
        help="of each rank, as 80GB or 80GiB (default: the CUDA device's; on a CPU, this machine's over the ranks)",
    )
    return group


def _bytes(text: str) -> int:
    """A count of bytes, with or without a decimal or binary unit."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write 80GB, 80GiB or a count of bytes")
    unit = found[2] or ""
    return int(float(found[1]) * (1024 if unit.endswith("i") else 1000) ** " KMGT".index(unit[:1] or " "))


def _dry_run(config: "EngineConfig", options: argparse.Namespace) -> None:
    from raysonar.ranks.sizing import size_group

    size = size_group(config, memory=options.device_memory)
    print(json.dumps(size.json()) if options.json else size.text(), flush=True)
    size.check()


def _given(options: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Those options that were given."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def _engine_values(options: argparse.Namespace) -> dict[str, Any]:
    """EngineConfig's fields."""
    drafts = options.speculative_tokens
    return {
        **_given(options, "model", "dtype", "device", "threads", "max_model_len"),
        "speculation": {} if drafts is None else {"tokens": drafts},
        "scheduling": _given(options, "max_running", "token_budget"),
        "parallel": {
            field: value
            for field, value in (
                ("tensor", options.tensor_parallel),
                ("data", options.data_parallel),
                ("micro_batching", options.micro_batching),
            )
            if value is not None
        },
    }


def _serve(options: argparse.Namespace) -> None:
    from raysonar.config import parse_service_config
    from raysonar.serving.app import application_args, with_demo_model
    from raysonar.serving.local import Listening, run_service

    if options.model is not None:  # Ray's processes have working directories of their own
        options.model = os.path.abspath(options.model)
    values: dict[str, Any] = {**_given(options, "model_name"), "engine": _engine_values(options)}
    if not options.dry_run:
        _refuse_without_dry_run(options, "config", "json", "device_memory")
        config = parse_service_config(with_demo_model(values))
        return run_service(config, Listening(options.host, options.port, options.address))
    if options.config is not None:
        values = _overridden(application_args(options.config), values)
    return _dry_run(parse_service_config(with_demo_model(values)).engine, options)


def _refuse_without_dry_run(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        if getattr(options, name):
            advice = "; `serve run FILE` serves a file" if name == "config" else ""
            raise ConfigurationError(f"--{name.replace('_', '-')} is for a --dry-run{advice}")


def _overridden(values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """`values` with those `given` put in, section by section."""
    merged = dict(values)
    for key, value in given.items():
        inner = merged.get(key)
        merged[key] = _overridden(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged


def _generate(options: argparse.Namespace) -> None:
    from raysonar.config import parse_service_config
    from raysonar.driver.engine import Engine
    from raysonar.driver.params import SamplingParams
    from raysonar.ranks.start import start_ranks

    values = _given(
        options,
        *"max_tokens temperature seed top_p top_k min_p presence_penalty frequency_penalty".split(),
        *"repetition_penalty stop ignore_eos".split(),
    )
    params = SamplingParams(**values)
    config = parse_service_config({"engine": {"model": demo.TARGET, **_engine_values(options)}}).engine
    if options.dry_run:
        return _dry_run(config, options)
    _refuse_without_dry_run(options, "device_memory")
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


def _read_prompts(name: str) -> list[str]:
    """One prompt a line of a file, or of the standard input."""
    if name == "-" and (sys.stdin is None or sys.stdin.isatty()):
        raise ConfigurationError("no prompt: give --prompt TEXT, --input FILE, or prompts on the standard input")
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"cannot read prompts from {name}: {error}") from error
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
