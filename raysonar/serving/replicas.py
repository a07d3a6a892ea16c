"""Replicas of a deployment: asking all at once, and ending one."""

import logging
from typing import Any

import ray
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle

_NAMESPACE = "serve"
"""Of all replicas' actors."""

logger = logging.getLogger("ray.serve")


async def answers_of_all(deployment: DeploymentHandle[Any], method: str, *args: object, timeout_s: float) -> list[Any]:
    """What each replica returns, or the exception that it raises; empty while there is none. Raises TimeoutError."""
    try:
        broadcast = deployment.broadcast(method, *args)
        answers: list[Any] = await broadcast.results_async(timeout_s=timeout_s, return_exceptions=True)
    except DeploymentUnavailableError:
        return []
    return answers


def actor_name() -> str:
    """Of the replica that this process is; empty outside of one."""
    return (ray.get_runtime_context().get_actor_name() or "") if ray.is_initialized() else ""


def end_actor(name: str) -> None:
    """Kill a replica, also one that hangs; Serve puts another one in its place."""
    try:
        ray.kill(ray.get_actor(name, _NAMESPACE))
    except Exception:
        logger.exception("%s cannot be ended", name)
