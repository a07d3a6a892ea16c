"""Processes of Ray that tests kill or stop."""

import time
from pathlib import Path


def pids_of(name: str) -> set[int]:
    """Of this machine's Ray processes whose title has `name` in it: "ServeReplica:app:Driver", "RankActor"."""
    return {
        int(entry.name)
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and is_alive(int(entry.name)) and name in _title(int(entry.name))
    }


def is_alive(pid: int) -> bool:
    """Whether there is such a process, not counting one that only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def assert_gone(pids: set[int], timeout_s: float = 10.0) -> None:
    """Within a few seconds."""
    deadline = time.monotonic() + timeout_s
    while alive := {pid for pid in pids if is_alive(pid)}:
        assert time.monotonic() < deadline, f"still there: {alive}"
        time.sleep(0.05)


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
