"""The Ray actor of one rank: it joins the process group, loads its part of the model, and works on steps."""

import fcntl
import os
import select
import socket
import struct
import threading
import traceback
from dataclasses import dataclass
from datetime import timedelta

import ray
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from raysonar.config import EngineConfig
from raysonar.moe.communicator import Communicator, Place, Wire
from raysonar.observe.timeline import Span, now
from raysonar.ranks.build import build_rank
from raysonar.ranks.channel import RankInfo
from raysonar.ranks.frames import Kind, receive_frame, send_frame
from raysonar.ranks.rank import Rank
from raysonar.step import StepPlan

Address = tuple[str, int]
_SIOCGIFADDR = 0x8915
"""Linux: an interface's IPv4 address (netdevice(7))."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """Where the ranks and the driver find each other."""

    store: Address
    """Of rank 0's store, the process group's rendezvous."""
    driver: Address
    """Where the driver takes the ranks' step connections."""
    secret: bytes


class RankActor:
    """One rank of a group; made a Ray actor by the group."""

    def __init__(self, config: EngineConfig, place: Place) -> None:
        torch.set_num_threads(config.threads or 1)
        self._config, self._place = config, place
        self._store: TCPStore | None = None
        self._rank: Rank | None = None
        self._working = threading.Lock()
        """Held from a plan's coming until its draft is done."""

    def host(self) -> str:
        """This node's address."""
        return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]

    def open_store(self) -> Address:
        """Make the rendezvous of the group; rank 0 is asked to."""
        host = self.host()
        self._store = TCPStore(
            host, 0, self._place.world, is_master=True, wait_for_workers=False, timeout=self._start_timeout
        )
        return host, self._store.port

    def start(self, meeting: Meeting) -> RankInfo:
        """Join the group, load the model, connect to the driver; steps are worked on from now on, in a thread.

        Raises ConfigurationError or ModelFolderError when the model cannot be served so.
        """
        place = self._place
        if self._store is None:
            self._store = TCPStore(*meeting.store, place.world, is_master=False, timeout=self._start_timeout)
        backend = "nccl" if self._config.device.startswith("cuda") else "gloo"
        _use_interface_of(self.host())
        dist.init_process_group(
            backend,
            store=PrefixStore("raysonar", self._store),
            rank=place.rank,
            world_size=place.world,
            timeout=timedelta(seconds=self._config.parallel.collective_timeout_s),
        )
        rank, info = build_rank(self._config, self.communicators())
        self._rank = rank
        dist.barrier()
        connection = socket.create_connection(meeting.driver, timeout=self._config.parallel.start_timeout_s)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)  # the driver's silence is its own business; its end closes the connection
        send_frame(connection, Kind.HELLO, place.rank.to_bytes(4, "little") + meeting.secret)
        threading.Thread(target=self._work, args=(connection, rank), name="raysonar-steps", daemon=True).start()
        return info

    def communicators(self) -> list[Communicator]:
        """One for each half of a step."""
        parallel = self._config.parallel
        wire = Wire(float8=parallel.dispatch_dtype == "float8", padded_bytes=parallel.padded_dispatch_bytes)
        return [Communicator.of_default_group(self._place, parallel.collective_timeout_s, wire) for _ in range(2)]

    def clock(self) -> int:
        """Nanoseconds, of this host's clock."""
        return now()

    def take_spans(self) -> list[Span]:
        """The spans of traced steps since they were last taken; the step at work is finished first."""
        assert self._rank is not None
        with self._working:
            return self._rank.timeline.take()

    @property
    def _start_timeout(self) -> timedelta:
        return timedelta(seconds=self._config.parallel.start_timeout_s)

    def _work(self, connection: socket.socket, rank: Rank) -> None:
        """Work on plans until the driver is gone; what goes wrong is the driver's to know."""
        leads = self._place.tensor_rank == 0
        with connection:
            try:
                while True:
                    idle_since = None if _readable(connection) else now()
                    try:
                        _, plan = receive_frame(connection)
                    except OSError:
                        return
                    with self._working:
                        rank.timeline.plan_came(idle_since)
                        result = rank.verify(StepPlan.unpack(plan))
                        if leads:
                            send_frame(connection, Kind.STEP, result.pack())
                        rank.draft()
            except Exception:
                message = f"rank {self._place.rank}: {traceback.format_exc()}"
                try:
                    send_frame(connection, Kind.FAILURE, message.encode())
                except OSError:
                    return


def _readable(connection: socket.socket) -> bool:
    """Whether something has come; does not wait."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _use_interface_of(address: str) -> None:
    """Let gloo and NCCL use the network interface that Ray uses, unless their own variables name another.

    Left alone, gloo takes the one that the host's name resolves to, which on hosts with several is often a wrong one.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode())
            try:
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:
                continue  # an interface without an IPv4 address
            if socket.inet_ntoa(reply[20:24]) == address:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
                os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
