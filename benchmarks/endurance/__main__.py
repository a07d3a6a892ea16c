"""Mixed load for an hour, a batch beside it: nothing fails, and nothing is left; see docs/reliability.md, "Endurance".

PYTHONPATH=benchmarks python -m endurance --minutes 60
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
from measure import emit, machine, table
from service import RAYSONAR, serving

from endurance.footprint import OURS, Footprint, footprints
from endurance.traffic import Traffic

_IDLE_S = 60.0
_GROWTH = 0.05
"""Of memory, after the warm-up."""
_GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}

Held = dict[str, Footprint]
"""By process."""
Samples = list[Held]


class Run:
    """One run: its clients, its batches, and what the processes held every few seconds."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self._url, self._options = url, options
        self._deadline: float = time.monotonic() + 60 * options.minutes
        self.samples: Samples = []
        self.done: Counter[str] = Counter()
        self.rows = 0
        """Of batches that are complete."""

    def over(self) -> bool:
        """Whether its time is up."""
        return time.monotonic() > self._deadline

    async def go(self) -> None:
        """Raises RuntimeError for the first answer that is not as it should be."""
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self._url, limits=limits) as client, asyncio.TaskGroup() as tasks:
            for seed in range(self._options.clients):
                traffic = Traffic(client, seed, self.done)
                tasks.create_task(traffic.go_on(self.over, self._options.pause))
            tasks.create_task(self._batches())
            tasks.create_task(self._sample())

    async def _batches(self) -> None:
        prompts = [json.dumps({"prompt": f"Town {row}:", "max_tokens": 32}) for row in range(self._options.rows)]
        while not self.over():
            with tempfile.TemporaryDirectory() as folder:
                given, made = Path(folder, "in.jsonl"), Path(folder, "out.jsonl")
                given.write_text("\n".join(prompts))
                files = ["--input", given, "--output", made]
                command = [RAYSONAR, "batch", *files, "--endpoint", f"{self._url}/v1", "--concurrency", 4, "--raw"]
                process = await asyncio.create_subprocess_exec(*map(str, command), stderr=subprocess.PIPE)
                _, said = await process.communicate()
                answers = [json.loads(line) for line in made.read_text().splitlines()] if made.exists() else []
                if process.returncode or len(answers) != len(prompts) or any(each["error"] for each in answers):
                    raise RuntimeError(f"a batch ended with {process.returncode}: {said.decode()[-500:]}")
                self.rows += len(answers)

    async def _sample(self) -> None:
        while not self.over():
            await asyncio.sleep(self._options.sample)
            held = footprints()
            self.samples.append(held)
            emit(
                requests=self.done.total(),
                rows=self.rows,
                memory_mb={name: round(each.memory_mb, 1) for name, each in held.items()},
                files={name: each.files for name, each in held.items()},
            )


def idle(url: str) -> dict[str, float]:
    """What is still held when requests have ended, by the names of the gauges; it should all be 0 within a minute."""
    deadline = time.monotonic() + _IDLE_S
    while True:
        lines = httpx.get(f"{url}/metrics", timeout=30).text.splitlines()
        held = {
            name: float(line.split()[-1]) for line in lines for name in _GAUGES if line.startswith(f"raysonar_{name}")
        }
        if held.keys() != _GAUGES:
            raise RuntimeError(f"/metrics has {sorted(held)}, not all of {sorted(_GAUGES)}")
        if not any(held.values()) or time.monotonic() > deadline:
            return held
        time.sleep(0.5)


def compare(samples: Samples, before: Held, after: Held, warm: float) -> list[dict[str, Any]]:
    """Each process: memory in the first and the last tenth after the warm-up, open files before and after the load.

    Raises RuntimeError when a process was not there all the time.
    """
    for name in before:
        if not all(name in held for held in (*samples, after)):
            raise RuntimeError(f"{name} was not there all the time")
    steady = samples[int(len(samples) * warm) :]
    tenth = max(len(steady) // 10, 1)

    def memory(part: Samples, name: str) -> float:
        return statistics.median(held[name].memory_mb for held in part)

    return [
        {
            "process": name,
            "warm_mb": (warm_mb := memory(steady[:tenth], name)),
            "end_mb": (end_mb := memory(steady[-tenth:], name)),
            "growth": end_mb / warm_mb - 1,
            "files_before": before[name].files,
            "files_after": after[name].files,
        }
        for name in before
    ]


def faults(rows: Sequence[dict[str, Any]], held: dict[str, float]) -> list[str]:
    """What has leaked."""
    ours = [row for row in rows if row["process"].split()[0] in OURS]
    leaks = [f"{row['process']} grew by {row['growth']:.1%}" for row in ours if row["growth"] > _GROWTH]
    # some connections of Ray's between processes are made when they are first used, and stay
    leaks += [f"{row['process']} has more files open" for row in ours if row["files_after"] > row["files_before"] + 8]
    return leaks + [f"{name} is {value} at rest" for name, value in held.items() if value]


def main() -> int:
    """1 when something has leaked."""
    parser = argparse.ArgumentParser(prog="endurance", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--pause", type=float, default=0.0, help="mean seconds between a client's requests")
    parser.add_argument("--rows", type=int, default=200, help="of each batch")
    parser.add_argument("--sample", type=float, default=20.0, help="seconds between looks at the processes")
    parser.add_argument("--warm-up", type=float, default=0.25, help="share of the time that is not compared")
    options = parser.parse_args()
    emit(**{**machine(), **vars(options)})
    with serving("--data-parallel", 2, "--max-running", 16, "--threads", 1, "--micro-batching", "auto") as url:
        asyncio.run(_warm(url))
        before = footprints()
        run = Run(url, options)
        asyncio.run(run.go())
        held = idle(url)
        rows = compare(run.samples, before, footprints(), options.warm_up)
    for row in rows:
        emit(**row)
    emit(requests=dict(run.done), rows=run.rows, held=held)
    table(rows)
    leaks = faults(rows, held)
    print("\n".join(leaks) or "nothing has leaked", file=sys.stderr)
    return int(bool(leaks))


async def _warm(url: str) -> None:
    """One request of every kind, so that what is made once is made."""
    async with httpx.AsyncClient(base_url=url) as client:
        for _, ask in Traffic(client, 0, Counter()).kinds.values():
            await ask()


if __name__ == "__main__":
    sys.exit(main())
