"""A group of ranks on a Ray cluster: where they are placed, how they start, and the channel to them."""

import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raysonar.config import EngineConfig
from raysonar.errors import ConfigurationError, EngineFailedError, RaysonarError
from raysonar.moe.communicator import Place
from raysonar.observe.chrome import RankTimeline
from raysonar.ranks.actor import Meeting, RankActor
from raysonar.ranks.channel import RankInfo
from raysonar.ranks.connections import FRAME_TIMEOUT_S, StepConnections
from raysonar.ranks.frames import Kind, receive_frame
from raysonar.ranks.resources import rank_resources
from raysonar.ranks.timelines import collect_timelines

_CROWDED = 4
"""Ranks' threads that share a CPU at the most, where raysonar starts Ray by itself: enough to try layouts out."""
_WAIT_S = 1.0
"""How often a wait for Ray looks whether the group is still wanted, and what time it is."""


def start_group(config: EngineConfig, *, actor: type[RankActor] = RankActor) -> tuple["GroupChannel", RankInfo]:
    """Place and start tensor x data ranks, each an `actor`, within `parallel.start_timeout_s`.

    Raises ConfigurationError or ModelFolderError when the cluster or the model cannot do it, EngineFailedError when a
    rank dies on the way.
    """
    channel = GroupChannel(_Group(config, actor))
    try:
        return channel, channel.restart()
    except BaseException:
        channel.close()
        raise


class _Group:
    """The actors and what holds their places, which they keep when they are started again."""

    def __init__(self, config: EngineConfig, actor: type[RankActor]) -> None:
        self.actors: list[Any] = []
        self._actor = actor
        self._world = config.parallel.world
        self._placement: PlacementGroup | None = None
        self._owns_placement = False
        self._ended = False
        self._owns_ray = not ray.is_initialized()
        if self._owns_ray:
            _start_ray(config)
        self._config = config.model_copy(update={"device": _device(config)})
        self._bundle = rank_resources(self._config)

    def start(self) -> tuple[StepConnections, RankInfo]:
        """Kill the actors there are, and start new ones in their places (in others, where a node is gone)."""
        deadline = time.monotonic() + self._config.parallel.start_timeout_s
        self._kill()
        self._place(deadline)
        return self._meet(deadline)

    def _place(self, deadline: float) -> None:
        """Create the actors in the reserved places, those of a node next to each other, from this node on."""
        parallel = self._config.parallel
        placement = self._reserve(deadline)
        here = ray.get_runtime_context().get_node_id()
        nodes: dict[int, str] = placement_group_table(placement)["bundles_to_node_id"]
        order = sorted(nodes, key=lambda bundle: (nodes[bundle] != here, nodes[bundle], bundle))
        for rank, bundle in enumerate(order):
            place = Place(rank=rank, tensor=parallel.tensor, data=parallel.data)
            remote = ray.remote(self._actor).options(  # type: ignore[attr-defined]
                num_cpus=self._bundle["CPU"],
                num_gpus=self._bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(placement, bundle),
            )
            self.actors.append(remote.remote(self._config, place))

    def _reserve(self, deadline: float) -> PlacementGroup:
        """The ranks' places, all of them there."""
        parallel = self._config.parallel
        if self._placement is None:
            self._placement = self._given_places()
        if self._placement is None:
            self._placement = placement_group([self._bundle] * self._world, strategy=parallel.placement)
            self._owns_placement = True
        while not self._placement.wait(_WAIT_S):
            self._check_wanted()
            if time.monotonic() > deadline:
                have = _processors(ray.cluster_resources())  # type: ignore[no-untyped-call]
                free = _processors(ray.available_resources())  # type: ignore[no-untyped-call]
                raise ConfigurationError(
                    f"parallel: no place for {self._world} ranks of {self._bundle} each ({parallel.placement}) within "
                    f"{parallel.start_timeout_s:.0f} s; the cluster has {have} in all, {free} free"
                )
        return self._placement

    def _given_places(self) -> PlacementGroup | None:
        """The placement group that this process is in, where it is for these ranks: a replica's of Serve."""
        current = get_current_placement_group()
        return current if current is not None and current.bundle_specs == [self._bundle] * self._world else None

    def _meet(self, deadline: float) -> tuple[StepConnections, RankInfo]:
        """Let the ranks find each other and load the model."""
        host = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        with socket.create_server((host, 0)) as server:
            secret = secrets.token_bytes(16)
            store = self._get([self.actors[0].open_store.remote()], deadline)[0]
            meeting = Meeting(store=store, driver=(host, server.getsockname()[1]), secret=secret)
            infos = self._get([actor.start.remote(meeting) for actor in self.actors], deadline)
            server.settimeout(max(deadline - time.monotonic(), 0.1))
            connections = _accept(server, self._world, secret)
        leaders = range(0, self._world, self._config.parallel.tensor)
        info = replace(infos[0], processes=tuple(process for each in infos for process in each.processes))
        return StepConnections(connections, leaders), info

    def _get(self, calls: list[Any], deadline: float) -> list[Any]:
        """The calls' results; the first failure is raised at once, not when the last call has ended."""
        pending = list(calls)
        try:
            while pending:
                done, pending = ray.wait(pending, timeout=_WAIT_S)
                ray.get(done)
                self._check_wanted()
                if pending and time.monotonic() > deadline:
                    raise ConfigurationError(
                        f"parallel: the ranks were not up within {self._config.parallel.start_timeout_s:.0f} s"
                    )
            return list(ray.get(calls))
        except RaysonarError:
            raise
        except ray.exceptions.RayError as error:
            raise EngineFailedError(f"a rank failed to start: {error}") from error

    def _check_wanted(self) -> None:
        if self._ended:
            raise EngineFailedError("the group was ended while it was being started")

    def _kill(self) -> None:
        while self.actors:
            ray.kill(self.actors.pop())

    def end(self) -> None:
        """Kill the actors and give up their places, and Ray if it was started for them. May be called again."""
        self._ended = True
        self._kill()
        if self._placement is not None and self._owns_placement:
            remove_placement_group(self._placement)
        self._placement = None
        if self._owns_ray:
            ray.shutdown()
            self._owns_ray = False


class GroupChannel:
    """The step channel to a group of ranks, which it can start again, and ends when it is closed."""

    def __init__(self, group: "_Group") -> None:
        self._group = group
        self._connections: StepConnections | None = None
        self._processes: tuple[tuple[str, int], ...] = ()

    def restart(self) -> RankInfo:
        """Start the ranks, within `parallel.start_timeout_s`; those there are, well or not, are killed first."""
        self._hang_up()
        self._connections, info = self._group.start()
        self._processes = info.processes
        return info

    def send(self, plans: Sequence[bytes]) -> None:
        """Queue a step: a packed StepPlan for each data-parallel row."""
        self._connected.send(plans)

    def receive(self, timeout: float) -> list[bytes]:
        """The oldest outstanding step's packed StepResults."""
        return self._connected.receive(timeout)

    def check(self) -> None:
        """Raises EngineFailedError when a rank has said that it failed, or is gone."""
        self._connected.check()

    def timelines(self, timeout: float) -> list[RankTimeline]:
        """Of all ranks."""
        return collect_timelines(self._group.actors, self._processes, timeout)

    def close(self) -> None:
        """End the ranks, and a start that another thread waits for; may be called again."""
        self._hang_up()
        self._group.end()

    @property
    def _connected(self) -> StepConnections:
        if self._connections is None:
            raise EngineFailedError("the group's channel is closed")
        return self._connections

    def _hang_up(self) -> None:
        connections, self._connections = self._connections, None
        if connections is not None:
            connections.close()


def _processors(resources: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in resources.items() if name in ("CPU", "GPU")}


def _device(config: EngineConfig) -> str:
    """What "auto" means here: GPUs where the cluster has one for every rank, else CPUs."""
    if config.device != "auto":
        return config.device
    gpus = ray.cluster_resources().get("GPU", 0)  # type: ignore[no-untyped-call]
    return "cuda" if gpus >= config.parallel.world else "cpu"


def local_cpus(config: EngineConfig, engines: int = 1) -> int:
    """CPUs that a Ray of our own on this machine says it has: what it has, or what the ranks ask for if that is more.

    Raises ConfigurationError when the ranks would only stand in each other's way.
    """
    have = len(os.sched_getaffinity(0))
    ranks = engines * config.parallel.world
    wanted = ranks * (config.threads or 1)
    if config.device in ("auto", "cpu") and wanted > _CROWDED * have and not torch.cuda.is_available():
        raise ConfigurationError(
            f"parallel: {ranks} ranks of {config.threads or 1} threads want {wanted} CPUs; this "
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
        connection.settimeout(FRAME_TIMEOUT_S)
        kind, payload = receive_frame(connection)
        if kind is not Kind.HELLO or not secrets.compare_digest(payload[4:], secret):
            connection.close()
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connections[int.from_bytes(payload[:4], "little")] = connection
    return dict(sorted(connections.items()))
