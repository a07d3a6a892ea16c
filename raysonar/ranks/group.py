"""A group of ranks on a Ray cluster: where they are placed, how they start, and the channel to them."""

import logging
import os
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import ray
import torch
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raysonar.config import EngineConfig
from raysonar.errors import ConfigurationError, EngineFailedError, RaysonarError
from raysonar.moe.communicator import Place
from raysonar.observe.chrome import RankTimeline
from raysonar.ranks.actor import Meeting, RankActor
from raysonar.ranks.channel import RankInfo
from raysonar.ranks.frames import Kind, receive_frame, send_frame
from raysonar.ranks.timelines import collect_timelines

_CROWDED = 4
"""Ranks' threads that share a CPU at the most, where raysonar starts Ray by itself: enough to try layouts out."""
_FRAME_TIMEOUT_S = 30.0
"""How long the rest of a frame may take once it has begun, and how long a rank may refuse to take a plan."""


def start_group(config: EngineConfig, *, actor: type[RankActor] = RankActor) -> tuple["GroupChannel", RankInfo]:
    """Place and start tensor x data ranks, each an `actor`, within `parallel.start_timeout_s`.

    Raises ConfigurationError or ModelFolderError when the cluster or the model cannot do it, EngineFailedError when a
    rank dies on the way.
    """
    deadline = time.monotonic() + config.parallel.start_timeout_s
    group = _Group(config, actor)
    try:
        group.place(deadline)
        return group.start(deadline)
    except BaseException:
        group.end()
        raise


class _Group:
    """The actors and what holds their places."""

    def __init__(self, config: EngineConfig, actor: type[RankActor]) -> None:
        self._actor = actor
        self._world = config.parallel.world
        self._actors: list[Any] = []
        self._placement: PlacementGroup | None = None
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            _start_ray(config)
        self._config = config.model_copy(update={"device": _device(config)})

    @property
    def _bundle(self) -> dict[str, float]:
        """What one rank needs."""
        need = {"CPU": float(self._config.threads or 1)}
        if self._config.device.startswith("cuda"):
            need["GPU"] = 1.0
        return need

    def place(self, deadline: float) -> None:
        """Reserve the ranks' places and create the actors, those of a node next to each other, from this node on."""
        parallel = self._config.parallel
        self._placement = placement_group([self._bundle] * self._world, strategy=parallel.placement)
        if not self._placement.wait(max(deadline - time.monotonic(), 0.1)):
            have = _processors(ray.cluster_resources())  # type: ignore[no-untyped-call]
            free = _processors(ray.available_resources())  # type: ignore[no-untyped-call]
            raise ConfigurationError(
                f"parallel: no place for {self._world} ranks of {self._bundle} each ({parallel.placement}) within "
                f"{parallel.start_timeout_s:.0f} s; the cluster has {have} in all, {free} free"
            )
        here = ray.get_runtime_context().get_node_id()
        nodes: dict[int, str] = placement_group_table(self._placement)["bundles_to_node_id"]
        order = sorted(nodes, key=lambda bundle: (nodes[bundle] != here, nodes[bundle], bundle))
        for rank, bundle in enumerate(order):
            place = Place(rank=rank, tensor=parallel.tensor, data=parallel.data)
            remote = ray.remote(self._actor).options(  # type: ignore[attr-defined]
                num_cpus=self._bundle["CPU"],
                num_gpus=self._bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._placement, bundle),
            )
            self._actors.append(remote.remote(self._config, place))

    def start(self, deadline: float) -> tuple["GroupChannel", RankInfo]:
        """Let the ranks find each other and load the model."""
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        with socket.create_server((host, 0)) as server:
            secret = secrets.token_bytes(16)
            store = self._get([self._actors[0].open_store.remote()], deadline)[0]
            meeting = Meeting(store=store, driver=(host, server.getsockname()[1]), secret=secret)
            infos = self._get([actor.start.remote(meeting) for actor in self._actors], deadline)
            server.settimeout(max(deadline - time.monotonic(), 0.1))
            connections = _accept(server, self._world, secret)
        parallel = self._config.parallel
        leaders = range(0, self._world, parallel.tensor)
        info = replace(infos[0], processes=tuple(process for each in infos for process in each.processes))
        timelines = partial(collect_timelines, self._actors, info.processes)
        return GroupChannel(connections, leaders=leaders, timelines=timelines, end=self.end), info

    def _get(self, calls: list[Any], deadline: float) -> list[Any]:
        """The calls' results; the first failure is raised at once, not when the last call has ended."""
        pending = list(calls)
        try:
            while pending:
                done, pending = ray.wait(pending, timeout=max(deadline - time.monotonic(), 0.0))
                if not done:
                    raise ConfigurationError(
                        f"parallel: the ranks were not up within {self._config.parallel.start_timeout_s:.0f} s"
                    )
                ray.get(done)
            return list(ray.get(calls))
        except RaysonarError:
            raise
        except ray.exceptions.RayError as error:
            raise EngineFailedError(f"a rank failed to start: {error}") from error

    def end(self) -> None:
        """Kill the actors and give up their places, and Ray if it was started for them. May be called again."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False


class GroupChannel:
    """Step connections to all ranks: plans go to every rank of a row, results come from the row's first."""

    def __init__(
        self,
        connections: dict[int, socket.socket],
        *,
        leaders: Sequence[int],
        timelines: Callable[[float], list[RankTimeline]],
        end: Callable[[], None],
    ) -> None:
        """connections: by rank; leaders: the first rank of each data-parallel row; end: called when it is closed."""
        self._connections, self._leaders, self._end = connections, leaders, end
        self.timelines = timelines
        self._results: dict[int, deque[bytes]] = {rank: deque() for rank in leaders}
        self._selector = selectors.DefaultSelector()
        for rank, connection in connections.items():
            connection.settimeout(_FRAME_TIMEOUT_S)
            self._selector.register(connection, selectors.EVENT_READ, rank)

    def send(self, plans: Sequence[bytes]) -> None:
        """Queue a step: a packed StepPlan for each data-parallel row."""
        tensor = len(self._connections) // len(self._leaders)
        for rank, connection in self._connections.items():
            try:
                send_frame(connection, Kind.STEP, plans[rank // tensor])
            except OSError as error:
                raise EngineFailedError(self._last_words(rank) or f"rank {rank} is gone: {error}") from None

    def receive(self, timeout: float) -> list[bytes]:
        """The oldest outstanding step's packed StepResults."""
        deadline = time.monotonic() + timeout
        while not all(self._results.values()):
            ready = self._selector.select(max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise TimeoutError(f"the step brought no result within {timeout} s")
            for key, _ in ready:
                self._take(key.data)
        return [self._results[rank].popleft() for rank in self._leaders]

    def _take(self, rank: int) -> None:
        try:
            kind, payload = receive_frame(self._connections[rank])
        except OSError as error:
            raise EngineFailedError(f"rank {rank} is gone: {error}") from None
        if kind is not Kind.STEP:
            raise EngineFailedError(payload.decode())
        self._results[rank].append(payload)

    def _last_words(self, rank: int) -> str | None:
        """What a rank that has closed its connection said at last."""
        try:
            while (frame := receive_frame(self._connections[rank]))[0] is not Kind.FAILURE:
                pass
        except OSError:
            return None
        return frame[1].decode()

    def close(self) -> None:
        """End the ranks; may be called again."""
        self._selector.close()
        for connection in self._connections.values():
            connection.close()
        self._end()


def _processors(resources: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in resources.items() if name in ("CPU", "GPU")}


def _device(config: EngineConfig) -> str:
    """What "auto" means here: GPUs where the cluster has one for every rank, else CPUs."""
    if config.device != "auto":
        return config.device
    gpus = ray.cluster_resources().get("GPU", 0)  # type: ignore[no-untyped-call]
    return "cuda" if gpus >= config.parallel.world else "cpu"


def local_cpus(config: EngineConfig) -> int:
    """CPUs that a Ray of our own on this machine says it has: what it has, or what the ranks ask for if that is more.

    Raises ConfigurationError when the ranks would only stand in each other's way.
    """
    have = len(os.sched_getaffinity(0))
    wanted = config.parallel.world * (config.threads or 1)
    if config.device in ("auto", "cpu") and wanted > _CROWDED * have and not torch.cuda.is_available():
        raise ConfigurationError(
            f"parallel: {config.parallel.world} ranks of {config.threads or 1} threads want {wanted} CPUs; this "
            f"machine has {have}, and at most {_CROWDED * have} are tried on it"
        )
    return max(have, wanted)


def _start_ray(config: EngineConfig) -> None:
    """A Ray of our own on this machine, or the cluster that Ray's own environment names (as in a submitted job)."""
    if "RAY_ADDRESS" in os.environ:
        ray.init()
    else:
        ray.init(
            address="local",
            num_cpus=local_cpus(config),
            include_dashboard=False,
            logging_level=logging.ERROR,
            log_to_driver=False,
        )


def _accept(server: socket.socket, world: int, secret: bytes) -> dict[int, socket.socket]:
    """Each rank's connection, by rank; others are turned away."""
    connections: dict[int, socket.socket] = {}
    while len(connections) < world:
        connection, _ = server.accept()
        connection.settimeout(_FRAME_TIMEOUT_S)
        kind, payload = receive_frame(connection)
        if kind is not Kind.HELLO or not secrets.compare_digest(payload[4:], secret):
            connection.close()
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connections[int.from_bytes(payload[:4], "little")] = connection
    return dict(sorted(connections.items()))
