"""`raysonar batch`: answer a file of requests."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raysonar.cli.options import (
    Commands,
    add_chat_options,
    add_engine_options,
    add_sampling_options,
    count,
    engine_options,
    engine_values,
    given,
    key_of,
    overridden,
    sampling_values,
)
from raysonar.errors import ConfigurationError

if TYPE_CHECKING:
    from raysonar.batch.run import Engines, Service

_SERVICE = "concurrency api_key_file"


def add_batch(commands: Commands) -> None:
    """The command `batch`."""
    parser = commands.add_parser(
        "batch",
        help="answer a file of requests",
        description="Answer every row of a file: OpenAI's batch format, or prompts. Every answer is kept as it comes: "
        "the same command goes on where it was ended. Figures and errors go to stderr.",
    )
    parser.set_defaults(run=_batch)
    files = parser.add_argument_group("files", "local paths, or URLs such as s3://bucket/rows.jsonl")
    files.add_argument("--input", required=True, metavar="FILE", help="JSON lines, Parquet or text, maybe compressed")
    files.add_argument("--output", required=True, metavar="FILE", help="JSON lines as OpenAI's, or .parquet")
    files.add_argument(
        "--format", choices=("jsonl", "parquet", "text"), help="of the input (default: by the ending of its name)"
    )
    files.add_argument("--ordered", action="store_true", help="keep the input's order (default: about that)")
    files.add_argument("--restart", action="store_true", help="begin anew, whatever an earlier run has done")
    add_chat_options(parser)
    _add_who(parser)
    add_sampling_options(parser, "of rows that do not say")
    add_engine_options(parser)


def _add_who(parser: argparse.ArgumentParser) -> None:
    engines = parser.add_argument_group("engines of its own")
    engines.add_argument("--model", metavar="FOLDER", help="a Hugging Face folder (default: the bundled demo model)")
    engines.add_argument("--config", type=Path, metavar="FILE", help="a Serve configuration; other options override it")
    engines.add_argument("--model-name", help="what rows call the model (default: the folder's name)")
    engines.add_argument("--replicas", type=count, metavar="N", help="engines, each in a Ray actor (default: 1)")
    service = parser.add_argument_group("a service that runs already, instead")
    which = service.add_mutually_exclusive_group()
    which.add_argument("--endpoint", metavar="URL", help="of OpenAI's API")
    which.add_argument("--serve-app", metavar="NAME", help="a raysonar application on the Ray cluster")
    service.add_argument("--concurrency", type=count, metavar="N", help="requests at a time (default: 64)")
    service.add_argument("--api-key-file", type=Path, metavar="FILE", help="holds the endpoint's key")
    parser.add_argument("--address", help="of a Ray cluster (default: the one that the job was submitted to, if any)")


def _batch(options: argparse.Namespace) -> None:
    from raysonar.batch.rows import Asking
    from raysonar.batch.run import Files, run_batch
    from raysonar.driver.params import SamplingParams

    files = Files(
        input=options.input,
        output=options.output,
        form=options.format,
        ordered=options.ordered,
        restart=options.restart,
    )
    defaults = sampling_values(options)
    SamplingParams(**defaults)  # refuses what no row could be asked with
    try:
        summary = run_batch(files, _who(options), Asking(defaults, options.chat))
    except KeyboardInterrupt:
        print("\n[ended; what is done is kept, and the same command goes on]", file=sys.stderr)
        raise
    errors = f", {summary.failed} of them errors" if summary.failed else ""
    print(f"[{options.output}: {summary.rows} rows{errors}]", file=sys.stderr)


def _who(options: argparse.Namespace) -> "Engines | Service":
    from raysonar.batch.run import Engines, Service
    from raysonar.config import parse_service_config
    from raysonar.serving.app import application_args, with_demo_model

    if options.endpoint is None and options.serve_app is None:
        _refuse(given(options, *_SERVICE.split()), "is for --endpoint and --serve-app")
        values: dict[str, Any] = {**given(options, "model_name"), "engine": engine_values(options)}
        if options.config is not None:
            values = overridden(application_args(options.config), values)
        config = parse_service_config(with_demo_model(values))
        return Engines(config=config, replicas=options.replicas or 1, address=options.address)
    own = given(options, "model", "config", "replicas", *engine_options())
    _refuse(own, "is for engines of the job's own, not for a service that runs already")
    return Service(
        endpoint=options.endpoint,
        application=options.serve_app,
        model=options.model_name,
        concurrency=options.concurrency or 64,
        api_key=key_of(options.api_key_file),
        address=options.address,
    )


def _refuse(values: dict[str, Any], why: str) -> None:
    for name in values:
        raise ConfigurationError(f"--{name.replace('_', '-')} {why}")
