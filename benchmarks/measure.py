"""What the benchmarks share: sides timed in turn, medians of ratios, JSON lines and a table."""

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def seconds(work: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Time of one call: the wall's, unless another clock is given."""
    start = clock()
    work()
    return clock() - start


def in_turn(sides: Mapping[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """Each side once a round, in an order that rotates, so that all see the same noise. Values by side and round."""
    names = list(sides)
    values: dict[str, list[T]] = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            values[name].append(sides[name]())
    return values


def median_ratio(values: Sequence[float], base: Sequence[float]) -> float:
    """The median over rounds of value / base: a slow spell of the machine slows both sides of its round."""
    return statistics.median(value / other for value, other in zip(values, base, strict=True))


def machine() -> dict[str, Any]:
    """Where the figures were measured."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    return {"cpu": cpu, "threads": torch.get_num_threads(), **versions}


def emit(**values: Any) -> None:
    """One JSON line on stdout; numbers to four significant digits."""
    short = {name: float(f"{value:.4g}") if isinstance(value, float) else value for name, value in values.items()}
    print(json.dumps(short), flush=True)


def table(rows: Sequence[Mapping[str, Any]]) -> None:
    """The rows as an aligned table, on stderr."""
    names = list(rows[0])
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(names))]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)), file=sys.stderr)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
