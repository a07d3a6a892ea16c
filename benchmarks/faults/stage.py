"""A cluster on this machine with the service on it: a head without places, and nodes with places for ranks."""

import logging
import os
import time
from collections.abc import Callable
from typing import Any, Self

import ray
from ray import serve
from ray.cluster_utils import Cluster
from service import free_port

from faults.victims import kill_with_children, parent, pids_of
from raysonar.observe.counters import EngineStats
from raysonar.serving.app import DEMO_NAME, build_app

APPLICATION = "faults"
_CPUS = 4
_START_S = 180.0


class Stage:
    """The application is deployed while the head is alone, so its ingress stands there; nodes come after."""

    def __init__(self, engine: dict[str, Any]) -> None:
        """engine: fields of EngineConfig."""
        self._engine = {"threads": 1, "device": "cpu", **engine}
        self.model = DEMO_NAME
        self._lost: Any = None

    def __enter__(self) -> Self:
        os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
        head = {"num_cpus": 0, "include_dashboard": False, "object_store_memory": 128 << 20}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            self._deploy()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all that was started."""
        if ray.is_initialized():
            serve.shutdown()
            ray.shutdown()
        self._cluster.shutdown()

    def _deploy(self) -> None:
        ray.init(address=self._cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        target = serve.RunTarget(build_app({"engine": self._engine}), name=APPLICATION, route_prefix="/")
        serve.run_many([target], wait_for_applications_running=False)
        self.wait("an ingress", lambda: bool(pids_of(f"ServeReplica:{APPLICATION}:Ingress")))
        for _ in range(2):
            self.add_node()
        self.wait("the service", lambda: serve.status().applications[APPLICATION].status == "RUNNING")

    def add_node(self) -> None:
        """One more, with places."""
        self._cluster.add_node(num_cpus=_CPUS, object_store_memory=128 << 20)

    def kill_node_of(self, name: str) -> None:
        """End all processes of a node that has one with this in its title.

        Raises RuntimeError when the ingress is there, too.
        """
        raylet = parent(min(pids_of(name)))
        if raylet in map(parent, pids_of(f"ServeReplica:{APPLICATION}:Ingress")):
            raise RuntimeError("the ingress is on this node, too")
        [self._lost] = [each for each in self._cluster.worker_nodes if _raylet(each) == raylet]
        kill_with_children(raylet)

    def replace_node(self) -> None:
        """Another node for the one that was killed, if one was."""
        lost, self._lost = self._lost, None
        if lost is not None:
            self._cluster.remove_node(lost, allow_graceful=False)
            self.add_node()

    def stats(self) -> EngineStats:
        """The engine's."""
        stats: EngineStats = serve.get_deployment_handle("Driver", APPLICATION).stats.remote().result(timeout_s=60)
        return stats

    def wait_until_idle(self) -> float:
        """Until nothing runs or waits and all pages are free; in how many seconds."""

        def idle() -> bool:
            stats = self.stats()
            return not (stats.running or stats.waiting) and stats.pages_free == stats.pages

        return self.wait("free pages", idle)

    def wait(self, what: str, holds: Callable[[], bool]) -> float:
        """Poll until it holds; in how many seconds. Raises RuntimeError after some minutes."""
        began = time.monotonic()
        while not holds():
            if time.monotonic() - began > _START_S:
                raise RuntimeError(f"waited for {what} for {_START_S:.0f} s")
            time.sleep(0.1)
        return time.monotonic() - began


def _raylet(node: Any) -> int:
    pid: int = node.all_processes["raylet"][0].process.pid
    return pid
