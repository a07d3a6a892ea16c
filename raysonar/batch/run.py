"""A job from its description: what to ask whom, where the rows are, where the answers go."""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from raysonar.batch.answers import EndpointAnswers
from raysonar.batch.job import Job, Summary
from raysonar.batch.ledger import Ledger
from raysonar.batch.place import Place
from raysonar.batch.progress import Progress
from raysonar.batch.replicas import ActorReplica, EndpointReplica, EngineReplica, Replica, ServeReplica
from raysonar.batch.rows import Asking, Format, Source, format_of
from raysonar.batch.writing import check_output
from raysonar.config import ServiceConfig
from raysonar.errors import ConfigurationError
from raysonar.ranks.group import local_cpus
from raysonar.serving.app import model_name
from raysonar.serving.local import check_cluster


@dataclass(frozen=True, kw_only=True)
class Files:
    """Where rows come from and go to: local paths or URLs of object stores."""

    input: str
    output: str
    form: Format | None = None
    """None goes by the input's name."""
    ordered: bool = False
    """The output is in the input's order."""
    restart: bool = False
    """Forget what an earlier run has done."""


@dataclass(frozen=True, kw_only=True)
class Engines:
    """Engines of the job's own."""

    config: ServiceConfig
    replicas: int = 1
    address: str | None = None
    """Ray's; None takes the cluster that the job was submitted to, else this machine."""


@dataclass(frozen=True, kw_only=True)
class Service:
    """A service that runs already: an endpoint with OpenAI's API, or a Serve application of ours."""

    endpoint: str | None = None
    application: str | None = None
    model: str | None = None
    """For rows that name none."""
    concurrency: int = 64
    """Requests at a time."""
    api_key: str | None = None
    address: str | None = None
    """As Engines has it, for an application."""


def run_batch(files: Files, by: Engines | Service, asking: Asking) -> Summary:
    """Answer all rows of `files.input` into `files.output`, going on from where an earlier run was ended.

    Raises ConfigurationError for what cannot work, ReplicaError and EngineFailedError when rows could not be answered.
    """
    source, output = _places(files)
    fingerprint = {"input": source.fingerprint(), "parameters": _parameters(by, asking)}
    ledger = Ledger(output, fingerprint, restart=files.restart)
    try:
        if ledger.complete is not None:
            return Summary(**ledger.complete)
        with _cluster(by):
            progress = Progress(lambda: source.fraction)
            return Job(source, ledger, _replicas(by, asking), progress, ordered=files.ordered).run()
    finally:
        ledger.release()


def _places(files: Files) -> tuple[Source, Place]:
    source, output = Place.of(files.input), Place.of(files.output)
    if not source.exists:
        raise ConfigurationError(f"{source} is not there")
    if source == output:
        raise ConfigurationError("the output must be another file than the input")
    check_output(output)
    return Source(source, files.form or format_of(files.input)), output


def _parameters(by: Engines | Service, asking: Asking) -> dict[str, Any]:
    """What the answers depend on."""
    named: Mapping[str, Any] = {"chat": asking.chat, **asking.defaults}
    if isinstance(by, Service):
        return {"model": by.model, **named}
    engine = by.config.engine
    folder = str(engine.model.resolve())
    return {"model": folder, "dtype": engine.dtype, "max_model_len": engine.max_model_len, **named} | {
        "model_name": model_name(by.config)
    }


def _replicas(by: Engines | Service, asking: Asking) -> Sequence[Replica]:
    if isinstance(by, Engines):
        if _needs_ray(by):
            return [ActorReplica(by.config, asking) for _ in range(by.replicas)]
        return [EngineReplica(by.config, asking)]
    if by.application is not None:
        return [ServeReplica(by.application, asking, concurrency=by.concurrency)]
    assert by.endpoint is not None
    answers = EndpointAnswers(by.endpoint, asking, concurrency=by.concurrency, api_key=by.api_key)
    return [EndpointReplica(answers, concurrency=by.concurrency, model=by.model)]


def _on_cluster(by: Engines | Service) -> bool:
    """Whether there is a cluster: named, or the one that a submitted job finds in Ray's own variable."""
    return by.address is not None or "RAY_ADDRESS" in os.environ


def _needs_ray(by: Engines | Service) -> bool:
    if isinstance(by, Engines):
        return by.replicas > 1 or _on_cluster(by)
    return by.application is not None


@contextmanager
def _cluster(by: Engines | Service) -> Iterator[None]:
    """Ray, where the job needs it."""
    if not _needs_ray(by):
        yield
        return
    import ray

    if ray.is_initialized():
        yield
        return
    quiet: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    if by.address is not None:
        check_cluster(by.address)
        ray.init(address=by.address, **quiet)
    elif _on_cluster(by) or isinstance(by, Service):
        ray.init(address=None if _on_cluster(by) else "auto", **quiet)
    else:
        cpus = local_cpus(by.config.engine, by.replicas)
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, **quiet)
    try:
        yield
    finally:
        ray.shutdown()  # type: ignore[no-untyped-call]
