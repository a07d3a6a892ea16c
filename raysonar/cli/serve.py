"""`raysonar serve`: OpenAI's HTTP API on Ray Serve."""

import argparse
import os
from pathlib import Path
from typing import Any

from raysonar.cli.options import (
    Commands,
    add_dry_run,
    add_engine_options,
    dry_run,
    engine_values,
    given,
    overridden,
    port,
    refuse_without_dry_run,
)


def add_serve(commands: Commands) -> None:
    """The command `serve`."""
    serve = commands.add_parser(
        "serve",
        help="serve OpenAI's HTTP API",
        description="Serve OpenAI's HTTP API on Ray Serve until Ctrl-C.",
    )
    serve.set_defaults(run=_serve)
    serve.add_argument("model", nargs="?", metavar="FOLDER", help="a Hugging Face folder (default: the demo model)")
    serve.add_argument("--host", default="127.0.0.1", help="where to listen (default: %(default)s, this machine only)")
    serve.add_argument("--port", type=port, default=8000, help="(default: %(default)s)")
    serve.add_argument("--address", help="of a running Ray cluster (default: start a Ray of its own)")
    serve.add_argument("--model-name", help="what clients ask for (default: the folder's name)")
    serve.add_argument(
        "--api-keys", metavar="FILE", dest="api_keys_file", help="a key a line, of which each request must have one"
    )
    serve.add_argument("--replicas", type=int, metavar="N", help="engines, each with all its ranks (default: 1)")
    serve.add_argument(
        "--max-replicas",
        type=int,
        metavar="M",
        help="start more than N, up to M, while the load asks for them; N may be 0 then",
    )
    add_engine_options(serve)
    group = add_dry_run(serve)
    group.add_argument(
        "--config", type=Path, metavar="FILE", help="size what `serve run FILE` would serve; other options override it"
    )
    group.add_argument("--json", action="store_true", help="print the sizes as an object")


def _serve(options: argparse.Namespace) -> None:
    from raysonar.config import parse_service_config
    from raysonar.serving.app import application_args, with_demo_model
    from raysonar.serving.local import Listening, run_service

    for name, path in given(options, "model", "draft_model", "api_keys_file").items():
        setattr(options, name, os.path.abspath(path))  # Ray's processes have working directories of their own
    values: dict[str, Any] = {**given(options, "model_name", "api_keys_file"), "engine": engine_values(options)}
    if options.max_replicas is not None:
        values["replicas"] = given(options, min="replicas", max="max_replicas")
    else:
        values |= given(options, "replicas")
    if not options.dry_run:
        refuse_without_dry_run(options, "config", "json", "device_memory")
        config = parse_service_config(with_demo_model(values))
        return run_service(config, Listening(options.host, options.port, options.address))
    if options.config is not None:
        values = overridden(application_args(options.config), values)
    return dry_run(parse_service_config(with_demo_model(values)).engine, options)
