"""The benchmark of two micro-batches over slow links (benchmarks/overlap), at its smallest; timings are not judged."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from overlap.link import Link, measure, network, unavailable
from overlap.models import LAYERS
from overlap.sleeping import ATTENTION, EXPERTS, SHARED

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
REASON = unavailable()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def namespaces() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


def test_links_have_the_delay_and_the_rate_that_they_are_set_to_while_they_run() -> None:
    with network(2) as (hosts, switch):
        assert all(name in namespaces() for name in hosts.names)
        for delay, rate in [(25, 80), (5, 300), (0, 40)]:
            switch.set(Link(delay_ms=delay, rate_mbit=rate))
            found = measure(hosts)
            assert delay <= found.delay_ms < delay + 20
            assert 0.4 * rate < found.rate_mbit < 1.02 * rate
    assert not any(name in namespaces() for name in hosts.names)


def test_the_smallest_point_goes_through_all_of_the_benchmark(tmp_path: Path) -> None:
    """Sleeping ranks on two hosts: the text stays, halves are as asked for, and no step takes less than it sleeps."""
    plot = tmp_path / "overlap.png"
    smallest = "--ranks 2 --delays 1 --rates 200 --batches 4 --rounds 1 --steps 3 --plot".split()
    ran = subprocess.run(
        [sys.executable, "-m", "overlap", *smallest, str(plot)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(BENCHMARKS), os.environ.get("PYTHONPATH", "")])},
    )
    assert ran.returncode == 0, ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    [text] = [line["same_text"] for line in lines if "same_text" in line]
    assert text
    [point] = [line for line in lines if "D" in line]
    assert (point["never_split"], point["always_split"]) == (0, 1)
    slept = sum(fixed + 4 * each for fixed, each in (ATTENTION, SHARED, EXPERTS))
    assert point["never_ms"] - point["never_exposed_ms"] >= 1e3 * (LAYERS + 1) * slept
    assert point["never_exposed_ms"] >= (LAYERS + 1) * 2 * 1 - 1e3 * (LAYERS + 1) * (SHARED[0] + 4 * SHARED[1])
    profile = next(line for line in lines if "w_us" in line)
    assert profile["w_us"] + 4 * profile["a_us"] > 0
    verdicts = {line["target"] for line in lines if "verdict" in line}
    assert len(verdicts) >= 4
    assert plot.read_bytes().startswith(b"\x89PNG")
