"""Processes of a Ray that this process has started, to kill or to stop."""

import os
import signal
import time
from pathlib import Path


def descendants(pid: int) -> set[int]:
    """Every process below this one."""
    found: set[int] = set()
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = {int(child) for task in tasks for child in (task / "children").read_text().split()}
    except (FileNotFoundError, ProcessLookupError):
        return found
    for child in children:
        found |= {child} | descendants(child)
    return found


def pids_of(name: str) -> set[int]:
    """Of our Ray's processes whose title has `name` in it: "ServeReplica:app:Driver", "RankActor"."""
    return {pid for pid in descendants(os.getpid()) if is_alive(pid) and name in _title(pid)}


def is_alive(pid: int) -> bool:
    """Whether there is such a process, not counting one that only waits to be reaped."""
    return _stat(pid)[:1] not in ([], ["Z"])


def parent(pid: int) -> int:
    """The process that started it; of a Ray worker the raylet of its node."""
    return int(_stat(pid)[1])


def assert_gone(pids: set[int], timeout_s: float = 10.0) -> None:
    """Within a few seconds."""
    deadline = time.monotonic() + timeout_s
    while alive := {pid for pid in pids if is_alive(pid)}:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.05)


def kill_with_children(pid: int) -> None:
    """As when a host loses its power: nothing has time for a word."""
    pids = [*descendants(pid), pid]
    for each in pids:  # stopped first, lest one sees another's end
        _signal(each, signal.SIGSTOP)
    for each in pids:
        _signal(each, signal.SIGKILL)


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def _stat(pid: int) -> list[str]:
    """Its state, its parent, ... (proc(5)); empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
