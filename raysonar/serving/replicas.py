"""Asking all replicas of a deployment at once."""

from typing import Any

from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle


async def answers_of_all(deployment: DeploymentHandle[Any], method: str, *args: object, timeout_s: float) -> list[Any]:
    """What each replica returns, or the exception that it raises; empty while there is none. Raises TimeoutError."""
    try:
        broadcast = deployment.broadcast(method, *args)
        answers: list[Any] = await broadcast.results_async(timeout_s=timeout_s, return_exceptions=True)
    except DeploymentUnavailableError:
        return []
    return answers
