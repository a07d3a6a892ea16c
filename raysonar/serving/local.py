"""`raysonar serve`: an application on this machine's own Ray, or on a cluster, until it is told to stop."""

import logging
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import RayServeException
from ray.serve.schema import ApplicationStatus, LoggingConfig

from raysonar import demo
from raysonar.config import ServiceConfig
from raysonar.errors import ConfigurationError, RaysonarError
from raysonar.ranks.group import local_cpus
from raysonar.serving.access import ApiKeys
from raysonar.serving.app import START_ATTEMPTS, application, model_name

APPLICATION = "raysonar"
_OBJECT_STORE_BYTES = 256 << 20
"""Deltas are small and travel beside the object store."""
_CONNECT_TIMEOUT_S = 10.0
_POLL_S = 0.2


class ServiceError(RaysonarError, RuntimeError):
    """The service could not be started."""


@dataclass(frozen=True)
class Listening:
    """Where to listen, and on which cluster."""

    host: str
    port: int
    address: str | None = None
    """Ray's address; None starts a Ray of its own."""


def run_service(config: ServiceConfig, where: Listening) -> None:
    """Serve until SIGINT or SIGTERM, then end what this call started: Serve, and Ray unless it was there already.

    Raises ConfigurationError and ServiceError when the service cannot start.
    """
    if where.address is None:
        _check_local(config, where)
    else:
        check_cluster(where.address)
    print(f"Starting {model_name(config)} ...", file=sys.stderr, flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        logs = _connect(config, where)
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ray has set its own
        if serve.status().proxies:
            raise ConfigurationError(f"Serve runs on {where.address} already: use `serve deploy` there")
        try:
            _deploy(config, where)
            _announce(config, where, logs)
            signal.pause()
        except KeyboardInterrupt:
            print("Stopping once running requests have ended; Ctrl-C again cuts them off.", file=sys.stderr, flush=True)
        finally:
            _stop(where)
    except KeyboardInterrupt:
        pass
    finally:
        ray.shutdown()  # type: ignore[no-untyped-call]


def _stop(where: Listening) -> None:
    """End the application when its running requests have ended, and Serve with it."""
    with suppress(TimeoutError, RayServeException):  # Serve waits for a minute, and may not have begun
        serve.delete(APPLICATION)
    if where.address is not None:
        serve.shutdown()  # type: ignore[no-untyped-call]


def _check_local(config: ServiceConfig, where: Listening) -> None:
    """Faults that are seen at once, before Ray takes its seconds to start."""
    if not (config.engine.model / "config.json").is_file():
        raise ConfigurationError(f"{config.engine.model} is not a model folder: it has no config.json")
    if not any(config.engine.model.glob("*.safetensors")):
        raise ConfigurationError(f"{config.engine.model} has no weights: there is no safetensors file in it")
    local_cpus(config.engine, config.replicas.max)
    if config.api_keys_file is not None:
        ApiKeys(config.api_keys_file)
    family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((where.host, where.port))
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {where.host}:{where.port}: {error.strerror}; --port takes another port"
            ) from error


def _connect(config: ServiceConfig, where: Listening) -> Path | None:
    """Returns the folder of the logs of a Ray that this starts."""
    if where.address is not None:
        ray.init(address=where.address, logging_level=logging.WARNING, log_to_driver=False)
        return None
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # Ray's own switch: nothing calls home
    context: Any = ray.init(
        address="local",
        num_cpus=local_cpus(config.engine, config.replicas.max),
        object_store_memory=_OBJECT_STORE_BYTES,
        include_dashboard=False,
        logging_level=logging.ERROR,
        log_to_driver=False,
    )
    return Path(context.address_info["session_dir"]) / "logs" / "serve"


def check_cluster(address: str) -> None:
    """Ray itself would try for many minutes."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon:  # "auto"
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT_S).close()
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"no Ray answers at {address}: {error}") from error


def _deploy(config: ServiceConfig, where: Listening) -> None:
    """Returns when the model answers."""
    serve.start(
        http_options={"host": where.host, "port": where.port}, logging_config=LoggingConfig(log_level="WARNING")
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    target = serve.RunTarget(application(config), name=APPLICATION, route_prefix="/")
    serve.run_many([target], wait_for_applications_running=False)
    deadline = time.monotonic() + START_ATTEMPTS * config.start_timeout_s
    while (status := serve.status().applications[APPLICATION]).status != ApplicationStatus.RUNNING:
        messages = [each.message for each in status.deployments.values() if each.message]
        if status.status == ApplicationStatus.DEPLOY_FAILED:
            raise ServiceError("the model could not be served: " + _cause(messages or [status.message]))
        if time.monotonic() > deadline:
            raise ServiceError("the model was not ready in time: " + _cause(messages or [status.message]))
        time.sleep(_POLL_S)


def _cause(messages: list[str]) -> str:
    """The error at the end of the tracebacks that Serve reports."""
    lines = [line.strip() for message in messages for line in message.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("raysonar.errors.")]
    return errors[-1].partition(": ")[2] if errors else " / ".join(lines[-3:])


def _announce(config: ServiceConfig, where: Listening, logs: Path | None) -> None:
    name = model_name(config)
    base = f"http://{f'[{where.host}]' if ':' in where.host else where.host}:{where.port}"
    local = where.host in ("127.0.0.1", "localhost", "::1")
    keys = config.api_keys_file is not None
    whoever = "open to others who have an API key" if keys else "open to others, without authentication"
    reach = "this machine only; --host 0.0.0.0 opens it to others" if local else whoever
    key = " -H 'Authorization: Bearer KEY'" if keys else ""
    if config.engine.model == demo.TARGET:
        route, question = (
            "chat/completions",
            '"messages": [{"role": "user", "content": "What is the capital of France?"}]',
        )
    else:
        route, question = "completions", '"prompt": "The capital of France is"'
    print(
        f"Serving {name} at {base}/v1 ({reach}).\n"
        f"In a browser: {base}/\n"
        f"Try it:\n"
        f"  curl {base}/v1/{route} -H 'Content-Type: application/json'{key} \\\n"
        f'    -d \'{{"model": "{name}", "temperature": 0, {question}}}\'\n'
        + (f"Logs: {logs}\n" if logs else "")
        + "Ctrl-C stops it.",
        flush=True,
    )
