"""`raysonar bench serve` and `raysonar bench offline`: what an endpoint, or an engine, takes to answer."""

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysonar.cli.options import Commands, add_engine_options, count, engine_config, key_of
from raysonar.errors import ConfigurationError

if TYPE_CHECKING:
    from raysonar.bench.prompts import Lengths, Sample
    from raysonar.bench.records import Record


def add_bench(commands: Commands) -> None:
    """The command `bench` and its own two."""
    bench = commands.add_parser("bench", help="measure an endpoint or an engine")
    kinds = bench.add_subparsers(required=True, metavar="KIND")
    serve = kinds.add_parser(
        "serve",
        help="an endpoint of OpenAI's API, ours or another's",
        description="Put load on an endpoint. Figures go to stderr, and as JSON to stdout or --output.",
    )
    serve.set_defaults(run=_serve)
    serve.add_argument("--endpoint", required=True, metavar="URL", help="up to /v1")
    serve.add_argument("--model", metavar="NAME", help="(default: the endpoint's first)")
    serve.add_argument("--api-key-file", type=Path, metavar="FILE", help="holds the endpoint's key")
    load = serve.add_argument_group("load")
    how = load.add_mutually_exclusive_group()
    how.add_argument("--rate", type=_positive, metavar="R", help="requests a second, whatever happens to them")
    how.add_argument("--concurrency", type=count, metavar="N", help="requests at a time (default: 8)")
    load.add_argument("--arrivals", choices=("poisson", "constant"), help="at a --rate (default: poisson)")
    load.add_argument("--route", choices=("chat", "completions"), default="chat", help="(default: %(default)s)")
    load.add_argument("--no-stream", action="store_false", dest="stream", help="ask for whole answers")
    load.add_argument("--timeout", type=_positive, default=600.0, metavar="S", help="of a request (default: 600)")
    serve.add_argument(
        "--slo", nargs="+", default=[], metavar="NAME=MS", help="goodput counts answers within ttft=, tpot=, e2e="
    )
    _add_requests(serve)
    offline = kinds.add_parser(
        "offline",
        help="an engine in this process",
        description="Hand an engine all requests at once. Figures go to stderr, and as JSON to stdout or --output.",
    )
    offline.set_defaults(run=_offline)
    offline.add_argument("--model", metavar="FOLDER", help="a Hugging Face folder (default: the bundled demo model)")
    offline.add_argument("--route", choices=("chat", "completions"), default="chat", help="(default: %(default)s)")
    _add_requests(offline)
    add_engine_options(offline)


def _add_requests(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("requests")
    group.add_argument("--requests", type=count, default=100, metavar="N", help="measured (default: %(default)s)")
    group.add_argument(
        "--warm-up", type=_not_negative, default=2, metavar="N", help="before them (default: %(default)s)"
    )
    source = group.add_mutually_exclusive_group()
    source.add_argument("--dataset", type=Path, metavar="FILE", help="JSON lines, or a list as ShareGPT's")
    source.add_argument("--random-words", type=_range, metavar="N[-M]", help="random prompts (default: 32-128 words)")
    group.add_argument("--max-tokens", type=_range, metavar="N[-M]", help="of an answer (default: 64)")
    group.add_argument("--ignore-eos", action="store_true", help="answers are as long as they may be")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T", help="(default: 0)")
    group.add_argument("--seed", type=int, default=0, metavar="S", help="of prompts, lengths and arrivals (default: 0)")
    out = parser.add_argument_group("results")
    out.add_argument("--output", type=Path, metavar="FILE", help="JSON: settings, figures, and each request")
    out.add_argument("--plot", type=Path, metavar="FILE", help="a PNG with the distributions")


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"it must be above 0, not {text}")
    return number


def _not_negative(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"it must not be negative, got {number}")
    return number


def _range(text: str) -> "Lengths":
    from raysonar.bench.prompts import Lengths

    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    low = int(found[1]) if found else 0
    high = int(found[2] or low) if found else 0
    if not 1 <= low <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not a length or a range; write 64 or 32-128")
    return Lengths(low, high)


def _serve(options: argparse.Namespace) -> None:
    import asyncio

    from raysonar.bench.client import Client
    from raysonar.bench.report import Objectives
    from raysonar.bench.serve import Load, run_load

    if options.arrivals is not None and options.rate is None:
        raise ConfigurationError("--arrivals is for a --rate")
    objectives = Objectives.parse(options.slo)
    samples = _samples(options)
    load = Load(
        requests=options.requests,
        warm_up=options.warm_up,
        rate=options.rate,
        poisson=options.arrivals != "constant",
        concurrency=None if options.rate else options.concurrency or 8,
        seed=options.seed,
    )
    client = Client(
        options.endpoint,
        chat=options.route == "chat",
        stream=options.stream,
        timeout_s=options.timeout,
        parameters={"temperature": options.temperature, **({"ignore_eos": True} if options.ignore_eos else {})},
        model=options.model,
        api_key=key_of(options.api_key_file),
    )

    async def run() -> list["Record"]:
        async with client:
            return await run_load(client, samples, load)

    _show(options, asyncio.run(run()), objectives)


def _offline(options: argparse.Namespace) -> None:
    from raysonar.bench.offline import run_offline
    from raysonar.bench.report import Objectives
    from raysonar.driver.engine import Engine

    config = engine_config(options)
    samples = _samples(options)
    with Engine(config) as engine:
        chat = options.route == "chat"
        if chat and not engine.tokenizer.has_chat_template:
            raise ConfigurationError(f"{config.model} has no chat template; --route completions continues prompts")
        parameters = {"temperature": options.temperature, "ignore_eos": options.ignore_eos}
        records = run_offline(
            engine, samples, parameters, requests=options.requests, warm_up=options.warm_up, chat=chat
        )
    _show(options, records, Objectives({}))


def _samples(options: argparse.Namespace) -> Iterator["Sample"]:
    """Endless; also looks at what the results will need, before anything runs."""
    from raysonar.bench.plot import check_plot
    from raysonar.bench.prompts import Lengths, random_samples, samples_of_file

    if options.plot is not None:
        check_plot(options.plot)
    if options.output is not None:
        options.output.write_text("")
    tokens = options.max_tokens or Lengths(64, 64)
    if options.dataset is not None:
        return samples_of_file(options.dataset, tokens, options.seed)
    return random_samples(options.random_words or Lengths(32, 128), tokens, options.seed)


def _show(options: argparse.Namespace, records: list["Record"], objectives: Any) -> None:
    from dataclasses import asdict

    from raysonar.bench.plot import write_plot
    from raysonar.bench.report import report, text

    figures = report(records, objectives)
    print(text(figures), file=sys.stderr)
    settings = {name: value for name, value in vars(options).items() if name not in ("run", "api_key_file")}
    result = {"settings": {name: _plain(value) for name, value in settings.items()}, **figures}
    if options.output is None:
        print(json.dumps(result, indent=2 if sys.stdout.isatty() else None))
    else:
        options.output.write_text(json.dumps({**result, "records": [asdict(record) for record in records]}) + "\n")
    if options.plot is not None:
        write_plot(options.plot, records, figures)
    if records and figures["failed"] == len(records):
        raise ConfigurationError(f"every request failed: {next(iter(figures['errors']))}")


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return vars(value) if hasattr(value, "__dict__") else value
