"""A service that runs for the tests, and how to look into it."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray import serve

from raysonar.observe.counters import EngineStats

APPLICATION = "raysonar"
MODEL = "tiny"
SLOTS = 4
MAX_WAITING = 64
MAX_ONGOING = 16


@dataclass(frozen=True)
class Service:
    """A running service: where it is, and Serve's name of its application."""

    url: str
    application: str = APPLICATION

    def driver(self, method: str) -> Any:
        """Call a method of the driver deployment."""
        return getattr(serve.get_deployment_handle("Driver", self.application), method).remote().result(timeout_s=30)

    def stats(self) -> EngineStats:
        return self.driver("stats")

    def wait_until(self, holds: Callable[[EngineStats], bool], timeout_s: float = 30.0) -> EngineStats:
        """Poll the engine's stats until `holds` says so."""
        deadline = time.monotonic() + timeout_s
        while not holds(stats := self.stats()):
            assert time.monotonic() < deadline, f"still {stats}"
        return stats

    def wait_until_idle(self) -> EngineStats:
        """Until no request runs or waits and no page is referenced; then all are free."""
        stats = self.wait_until(lambda stats: not (stats.running or stats.waiting or stats.pages_referenced))
        assert stats.pages_free == stats.pages
        return stats


Deploy = Callable[[str, serve.Application], Service]
"""Serves an application under a name."""
