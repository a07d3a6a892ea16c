"""Several hosts on one machine: network namespaces, with a Ray node in each.

Needs root and iproute2. What is started here is ended by its own process ids and names.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

RAY = Path(sys.executable).with_name("ray")


def unavailable() -> str | None:
    """Why there can be no hosts here; None when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "network namespaces need iproute2 (ip, tc)"
    name = f"raysonar-{uuid.uuid4().hex[:8]}"
    probe = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return f"no network namespaces here: {probe.stderr.strip()}" if probe.returncode else None


def run(command: str) -> None:
    """Run a command; raises CalledProcessError when it fails."""
    subprocess.run(command.split(), check=True, capture_output=True, timeout=30)


class Hosts:
    """Hosts 0 .. count - 1 with addresses 10.77.0.1 and so on, in network namespaces of a name of their own."""

    def __init__(self, count: int) -> None:
        self.name = f"raysonar-{uuid.uuid4().hex[:8]}"
        self.names = [f"{self.name}-{number}" for number in range(count)]

    def address(self, number: int) -> str:
        return f"10.77.0.{number + 1}"

    def inside(self, number: int, command: list[str]) -> list[str]:
        """The command that runs a command on a host."""
        return ["ip", "netns", "exec", self.names[number], *command]

    def start(self, number: int, command: list[str], log: Path, **environment: str) -> subprocess.Popen[bytes]:
        """Start a command on a host, as the leader of its own process group."""
        with log.open("wb") as output:
            return subprocess.Popen(
                self.inside(number, command),
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,
            )


@contextmanager
def namespaces(hosts: Hosts) -> Iterator[None]:
    """The hosts' network namespaces, which nothing joins yet."""
    with ExitStack() as stack:
        for name in hosts.names:
            run(f"ip netns add {name}")
            stack.callback(run, f"ip netns del {name}")
            run(f"ip -n {name} link set lo up")
        yield


@contextmanager
def ray_nodes(hosts: Hosts, folder: Path, cpus: int, **environment: str) -> Iterator[str]:
    """A Ray node on each host, the head on the first; gives the cluster's address. The workers see `environment`."""
    head = f"{hosts.address(0)}:6379"
    common = [f"--num-cpus={cpus}", "--object-store-memory=80000000", "--disable-usage-stats", "--block"]
    common.append("--include-log-monitor=false")
    settings = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", **environment}
    with ExitStack() as stack:
        # Ray's sockets want a shorter path than pytest's folders have
        sockets = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        for number in range(len(hosts.names)):
            own = [f"--node-ip-address={hosts.address(number)}"]
            if number:
                own.append(f"--address={head}")
            else:
                own += ["--head", "--port=6379", "--include-dashboard=false", f"--temp-dir={sockets}"]
            log = folder / f"node-{number}.log"
            node = hosts.start(number, [str(RAY), "start", *own, *common], log, **settings)
            stack.callback(end, node)
            await_node(log, node)  # one after the other: nodes that start together race
        yield head


def await_node(log: Path, process: subprocess.Popen[bytes], seconds: float = 120.0) -> None:
    """Until a Ray node that logs there has started; AssertionError when it has ended or takes longer."""
    deadline = time.monotonic() + seconds
    while "Ray runtime started" not in log.read_text():
        assert process.poll() is None, f"a Ray node ended: {log.read_text()}"
        assert time.monotonic() < deadline, f"a Ray node did not start: {log.read_text()}"
        time.sleep(0.1)


def end(process: subprocess.Popen[bytes]) -> None:
    """End a command and all that it has started."""
    tree = _descendants(process.pid)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(10)
    for pid in tree:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except FileNotFoundError:
        return []
    return [each for child in children for each in (int(child), *_descendants(int(child)))]
