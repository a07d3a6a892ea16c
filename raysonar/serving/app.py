"""The Serve application: `serve run`, `serve deploy` and `raysonar serve` all build it here."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import yaml
from pydantic import ValidationError
from ray import serve
from ray.serve import Application
from ray.serve.schema import LoggingConfig, ServeDeploySchema

from raysonar import demo
from raysonar.config import EngineConfig, ServiceConfig, describe, parse_service_config
from raysonar.errors import ConfigurationError
from raysonar.serving.driver import Driver
from raysonar.serving.ingress import Ingress

DEMO_NAME = "raysonar-demo"
BUILDER = "raysonar.serving.app:build_app"
"""The `import_path` of the application in Serve's configuration files."""

_SPARE = 64
"""Requests that Serve lets through beyond `max_ongoing_requests`: probes, and refusals of what is too much."""
_STREAMS_MAY_LAST_S = 3600.0
"""When a replica is replaced, the streams it serves may take so long to end."""
START_ATTEMPTS = 2
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
    """One driver, and one ingress, which logs each request."""
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
        **common,
    )(Driver)
    ingress = serve.deployment(
        ray_actor_options={"num_cpus": 0}, logging_config=LoggingConfig(encoding=encoding), **common
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
    return {"num_cpus": config.threads or 1, "num_gpus": int(config.device.startswith("cuda"))}
