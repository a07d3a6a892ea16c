"""Measures the grid of links; see docs/benchmarks.md, "Overlap"."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

from measure import emit, machine

from overlap import hosts, models
from overlap.driver import Task
from overlap.link import Link, measure, network, unavailable
from overlap.report import report

ROOT = Path(__file__).parents[2]


def cluster(ranks: int, mode: str, options: argparse.Namespace, folder: Path) -> Iterator[dict[str, Any]]:
    """The points of a number of ranks and a mode, as they are measured."""
    links = [Link(delay_ms=delay, rate_mbit=rate) for delay, rate in product(options.delays, options.rates)]
    links = links if ranks > 1 else links[:1]
    paths = os.pathsep.join((str(ROOT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])))
    with network(ranks) as (made, switch), hosts.ray_nodes(made, folder, cpus=1, PYTHONPATH=paths) as address:
        if ranks > 1:
            for link in links:
                switch.set(link)
                found = measure(made)
                emit(**asdict(link), measured_delay_ms=found.delay_ms, measured_rate_mbit=found.rate_mbit)
        task = Task(
            address=address,
            switch=switch.fileno,
            switch_process=switch.process,
            model=str(models.write(folder, mode)),
            mode=mode,
            ranks=ranks,
            links=[(link.delay_ms, link.rate_mbit) for link in links],
            batches=options.batches,
            rounds=options.rounds,
            steps=options.steps,
        )
        driver = subprocess.Popen(
            made.inside(0, [sys.executable, "-m", "overlap.driver", json.dumps(asdict(task))]),
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=[switch.fileno],
            env={**os.environ, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        )
        try:
            assert driver.stdout is not None
            for line in driver.stdout:
                print(line, end="", flush=True)
                values = json.loads(line)
                if "D" in values:
                    yield values
            if driver.wait():
                raise SystemExit(f"the driver of {ranks} ranks ended with status {driver.returncode}")
        finally:
            hosts.end(driver)


FULL = {"ranks": [2, 4], "delays": [0.1, 1, 3], "rates": [50, 100, 200], "batches": [8, 32, 128], "rounds": 3}
QUICK = {"ranks": [2], "delays": [0.1, 1], "rates": [100], "batches": [8, 32, 128], "rounds": 2}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="overlap", description=sys.modules["overlap"].__doc__)
    parser.add_argument("--quick", action="store_true", help="two links of two ranks")
    parser.add_argument("--ranks", type=int, nargs="+", help="1, too: a rank that waits for nothing but plans")
    parser.add_argument("--modes", nargs="+", choices=sorted(models.CONFIGS), default=["sleep"], help="of computing")
    parser.add_argument("--delays", type=float, nargs="+", help="ms, one way")
    parser.add_argument("--rates", type=float, nargs="+", help="Mbit/s, of a host's port, each way")
    parser.add_argument("--batches", type=int, nargs="+", help="D: rows in all; a step verifies 2 D tokens")
    parser.add_argument("--rounds", type=int, help="turns of each policy")
    parser.add_argument("--steps", type=int, default=5, help="of a turn (default: %(default)s)")
    parser.add_argument("--plot", type=Path, help="write a PNG of step times here")
    options = parser.parse_args()
    grid = (QUICK if options.quick else FULL) | {name: value for name, value in vars(options).items() if value}
    options = argparse.Namespace(**grid)
    if reason := unavailable():
        raise SystemExit(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # as an interrupt: hosts and their processes go
    began = time.monotonic()
    emit(**machine(), **{name: value for name, value in grid.items() if name != "plot"})
    points = []
    with tempfile.TemporaryDirectory() as folder:
        for mode, ranks in product(options.modes, options.ranks):
            own = Path(folder) / f"{mode}-{ranks}"
            own.mkdir()
            points += cluster(ranks, mode, options, own)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    report(points, getattr(options, "plot", None))


if __name__ == "__main__":
    main()
