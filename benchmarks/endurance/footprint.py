"""What the processes of a service hold: memory and open files."""

from dataclasses import dataclass
from pathlib import Path

from faults.victims import pids_of

PARTS = {
    "driver": ":Driver",
    "ingress": ":Ingress",
    "proxy": "ProxyActor",
    "controller": "ServeController",
    "rank": "RankActor",
    "raylet": "/raylet/raylet",
    "gcs": "/gcs/gcs_server",
}
"""What the title of a process has in it."""
OURS = ("driver", "ingress", "rank")


@dataclass(frozen=True)
class Footprint:
    """Of one process."""

    memory_mb: float
    """Resident: its own, and what it shares with others."""
    files: int
    """Open file descriptors."""


def footprints() -> dict[str, Footprint]:
    """Of each process below this one, by what it is and its process id."""
    return {f"{part} {pid}": _of(pid) for part, title in PARTS.items() for pid in sorted(pids_of(title))}


def _of(pid: int) -> Footprint:
    fields = (line.split() for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    [resident] = [int(line[1]) for line in fields if line[0] == "VmRSS:"]
    return Footprint(resident / 1024, len(list(Path(f"/proc/{pid}/fd").iterdir())))
