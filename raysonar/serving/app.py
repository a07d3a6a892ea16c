"""The Serve application: `serve run`, `serve deploy` and `raysonar serve` all build it here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import yaml
from pydantic import ValidationError
from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.schema import LoggingConfig, ServeDeploySchema

from raysonar import demo
from raysonar.config import EngineConfig, ServiceConfig, describe, parse_service_config
from raysonar.errors import ConfigurationError
from raysonar.ranks.resources import rank_resources
from raysonar.serving.driver import Driver
from raysonar.serving.ingress import Ingress
from raysonar.serving.routing import PrefixRouter

DEMO_NAME = "raysonar-demo"
BUILDER = "raysonar.serving.app:build_app"
"""The `import_path` of the application in Serve's configuration files."""

_SPARE = 64
"""Requests that Serve lets through beyond `max_ongoing_requests`: probes, and refusals of what is too much."""
_STREAMS_MAY_LAST_S = 3600.0
"""When a replica is replaced, the streams it serves may take so long to end."""
START_ATTEMPTS = 2
_FULL = 0.75
"""Of the slots of its replicas that a service uses before it starts another one."""
_SPREAD = 0.25
"""A replica that has more requests than another one, by so much of its slots, gets no more for their beginnings."""
_LOOK_BACK_S = (15.0, 30.0)
"""Serve averages the number of requests over the delay before it adds replicas, within these bounds: it is told the
number every 10 s."""
_ON_THE_HEAD = {"node:__internal_head__": 0.001}
"""Ray's own resource of the head node: the ingress keeps no node that the cluster could do without."""
_HEALTH_CHECK_PERIOD_S = 2.0
"""Serve replaces a driver after three checks that fail."""
_HEALTH_CHECK_TIMEOUT_S = 20.0
"""A check without an answer has failed: the driver's process is stopped, or starved."""


def build_app(args: Mapping[str, object]) -> Application:
    """The application for `args`, the fields of ServiceConfig; without `engine.model` it serves the bundled demo model.

    Raises ConfigurationError that names each field at fault.
    """
    return application(parse_service_config(with_demo_model(args)))


def application_args(file: Path) -> dict[str, Any]:
    """What `build_app` is given by a Serve configuration file.

    Raises ConfigurationError for a file that Serve would not take, or that has not one application of ours.
    """
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
        applications = ServeDeploySchema.model_validate(values).applications
    except ValidationError as error:
        raise ConfigurationError(f"{file}: not a Serve configuration: {describe(error)}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigurationError(f"{file}: cannot be read: {' '.join(str(error).split())}") from error
    ours = [each for each in applications if each.import_path == BUILDER]
    if len(ours) != 1:
        raise ConfigurationError(f"{file}: expected one application with import_path {BUILDER}, found {len(ours)}")
    return dict(ours[0].args)


def with_demo_model(args: Mapping[str, object]) -> dict[str, object]:
    """`args` with the bundled model's folder and name where they give no model."""
    engine = args.get("engine", {})
    if not isinstance(engine, Mapping) or "model" in engine:
        return dict(args)
    return {"model_name": DEMO_NAME, **args, "engine": {**engine, "model": demo.TARGET}}


def model_name(config: ServiceConfig) -> str:
    """What clients ask for."""
    return config.model_name or config.engine.model.resolve().name


def application(config: ServiceConfig) -> Application:
    """As many drivers as `replicas` says, and one ingress, which logs each request."""
    engine = on_device(config.engine)
    common: dict[str, Any] = {
        "max_ongoing_requests": config.max_ongoing_requests + _SPARE,
        "graceful_shutdown_timeout_s": _STREAMS_MAY_LAST_S,
        "graceful_shutdown_wait_loop_s": 0.2,
        "max_constructor_retry_count": START_ATTEMPTS,
    }
    encoding = config.log_format.upper()
    driver = serve.deployment(
        ray_actor_options=driver_resources(engine),
        health_check_period_s=_HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=_HEALTH_CHECK_TIMEOUT_S,
        logging_config=LoggingConfig(enable_access_log=False, encoding=encoding),
        **_places(engine),
        **_scaling(config),
        **_routing(config),
        **common,
    )(Driver)
    ingress = serve.deployment(
        ray_actor_options={"num_cpus": 0, "resources": _ON_THE_HEAD},
        logging_config=LoggingConfig(encoding=encoding),
        **common,
    )(Ingress)
    return ingress.bind(
        driver.bind(engine, config.start_timeout_s, model_name(config), config.limits),
        model_name(config),
        config,
    )


def on_device(config: EngineConfig) -> EngineConfig:
    """`config` with what Ray has to reserve spelt out: the device, and the CPU threads (one, unless told otherwise)."""
    has_gpu = ray.is_initialized() and ray.cluster_resources().get("GPU", 0) >= 1  # type: ignore[no-untyped-call]
    device = ("cuda" if has_gpu else "cpu") if config.device == "auto" else config.device
    return config.model_copy(update={"device": device, "threads": config.threads or 1})


def driver_resources(config: EngineConfig) -> dict[str, float]:
    """What a rank in the driver's own process needs; the ranks of a group reserve their own."""
    if config.parallel.world > 1:
        return {"num_cpus": 0, "num_gpus": 0}
    need = rank_resources(config)
    return {"num_cpus": need["CPU"], "num_gpus": need.get("GPU", 0)}


def _places(config: EngineConfig) -> dict[str, Any]:
    """The places of a group, which Serve reserves for its driver, beside one of the ranks: they wait for the cluster to
    grow as long as that takes, and no node is kept by a driver alone."""
    if config.parallel.world == 1:
        return {}
    return {
        "placement_group_bundles": [rank_resources(config)] * config.parallel.world,
        "placement_group_strategy": config.parallel.placement,
    }


def _slots(config: EngineConfig) -> int:
    """Requests that one engine runs at once."""
    return config.scheduling.max_running * config.parallel.data


def _scaling(config: ServiceConfig) -> dict[str, Any]:
    """How many replicas of the driver Serve keeps."""
    replicas = config.replicas
    if replicas.fixed:
        return {"num_replicas": replicas.min}
    low, high = _LOOK_BACK_S
    return {
        "autoscaling_config": AutoscalingConfig(
            min_replicas=replicas.min,
            # a service that may end its last replica starts with one: what cannot be served is refused when deployed
            initial_replicas=None if replicas.min else 1,
            max_replicas=replicas.max,
            target_ongoing_requests=replicas.target_ongoing_requests or max(1.0, _FULL * _slots(config.engine)),
            upscale_delay_s=replicas.upscale_delay_s,
            downscale_delay_s=replicas.downscale_delay_s,
            look_back_period_s=min(max(replicas.upscale_delay_s, low), high),
        )
    }


def _routing(config: ServiceConfig) -> dict[str, Any]:
    """Who gets a request: by its beginning, where that may be in the cache of one of several replicas."""
    if config.replicas.max == 1 or not config.engine.cache.prefix_caching:
        return {}
    spread = max(1, int(_SPREAD * _slots(config.engine)))
    router: dict[str, Any] = {"request_router_class": PrefixRouter, "request_router_kwargs": {"spread": spread}}
    return {"request_router_config": RequestRouterConfig(**router)}
