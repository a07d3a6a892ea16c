"""Whole Ray nodes die, on a cluster of several; a short form of benchmarks/faults."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("row", ["node", "ranks-node"])
def test_requests_outlive_a_node_where_another_one_stands_by(row: str) -> None:
    command = [sys.executable, "-m", "faults", row, "--runs", "1", "--requests", "8", "--tokens", "96"]
    paths = os.pathsep.join((str(ROOT), str(ROOT / "benchmarks")))
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    figures = json.loads([line for line in done.stdout.splitlines() if line.startswith("{")][-1])  # Ray may add lines
    assert (figures["row"], figures["requests"], figures["failures"], figures["different"]) == (row, 16, 0, 0)
    assert figures["tokens_compared"] == 2 * 10 * 96
