"""Links of a given delay and rate between hosts (switch.c), and what they are when measured."""

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from overlap import hosts
from overlap.hosts import Hosts, namespaces, run

BYTES = 1 << 20
"""Of the transfer that a link's rate is measured by."""

# Takes 4 bytes and gives them back as often as they come, then takes BYTES and acknowledges them.
_SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 7000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while (data := connection.recv(1 << 16)):
        if data[:1] == b"?":
            connection.sendall(data)
        else:
            left = int(sys.argv[2]) - len(data)
            while left:
                left -= len(connection.recv(1 << 16))
            connection.sendall(b"done")
"""
_CLIENT = """
import json, socket, sys, time
connection = socket.create_connection((sys.argv[1], 7000))
connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
def timed(data):
    start = time.perf_counter()
    connection.sendall(data)
    connection.recv(4)
    return time.perf_counter() - start
trips = [timed(b"????") for _ in range(15)]
bulk = [timed(bytes(int(sys.argv[2]))) for _ in range(4)]
print(json.dumps([min(trips), min(bulk)]))
"""


@dataclass(frozen=True, kw_only=True)
class Link:
    """What a packet meets on its way from one host to another."""

    delay_ms: float
    rate_mbit: float
    """Each way, of each host's port."""

    @property
    def bytes_per_second(self) -> float:
        """The rate."""
        return self.rate_mbit * 1e6 / 8


class Switch:
    """The running switch."""

    def __init__(self, process: int, links: IO[bytes]) -> None:
        """process: its id; links: its standard input."""
        self.process, self._links = process, links

    @property
    def fileno(self) -> int:
        """Where a process that has it can set links too."""
        return self._links.fileno()

    def set(self, link: Link) -> None:
        """From the next packet on."""
        set_link(self._links, link)


def set_link(links: IO[bytes], link: Link) -> None:
    """Tell the switch at the other end."""
    links.write(f"{1000 * link.delay_ms} {link.rate_mbit}\n".encode())
    links.flush()


def unavailable() -> str | None:
    """Why there can be no links here; None when there can."""
    if not shutil.which("cc"):
        return "the switch needs a C compiler (cc)"
    if not Path("/dev/net/tun").exists():
        return "the switch needs /dev/net/tun"
    return hosts.unavailable()


@contextmanager
def network(count: int) -> Iterator[tuple[Hosts, Switch]]:
    """Hosts joined by a switch, whose links have no delay and no limit until they are set."""
    made = Hosts(count)
    with tempfile.TemporaryDirectory() as folder, namespaces(made):
        program = Path(folder) / "switch"
        run(f"cc -O2 -o {program} {Path(__file__).with_name('switch.c')}")
        for name in made.names:
            for setting in ("congestion_control=reno", "slow_start_after_idle=0", "no_metrics_save=1"):
                run(f"ip netns exec {name} sysctl -qw net.ipv4.tcp_{setting}")
        with subprocess.Popen([program, *made.names], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                if process.stdout.readline() != b"ready\n":
                    raise RuntimeError(f"the switch did not start: exit status {process.wait(10)}")
                yield made, Switch(process.pid, process.stdin)
            finally:
                process.terminate()


def measure(hosts: Hosts) -> Link:
    """The link from host 0 to host 1: half a round trip of 4 bytes, and the rate of a transfer of BYTES over TCP.

    The fastest of some: what slows others down is the machine.
    """
    python, address = [sys.executable, "-S", "-c"], hosts.address(1)
    arguments = [address, str(BYTES)]
    with subprocess.Popen(hosts.inside(1, [*python, _SERVER, *arguments]), stdout=subprocess.PIPE) as server:
        try:
            assert server.stdout is not None
            server.stdout.readline()
            client = subprocess.run(
                hosts.inside(0, [*python, _CLIENT, *arguments]), capture_output=True, check=True, timeout=60
            )
        finally:
            server.terminate()
    trip, bulk = json.loads(client.stdout)
    return Link(delay_ms=1e3 * trip / 2, rate_mbit=8e-6 * BYTES / (bulk - trip))
