"""The table, the verdicts and the plot of points that were measured.

PYTHONPATH=benchmarks .venv/bin/python -m overlap.report runs/*.jsonl --plot docs/overlap.png
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from measure import emit, table

Point = dict[str, Any]
NAMES = ("mode", "ranks", "delay_ms", "rate_mbit", "D")
FIGURES = {
    "never": "never_ms",
    "always": "always_ms",
    "auto": "auto_ms",
    "exposed, never": "never_exposed_ms",
    "exposed, always": "always_exposed_ms",
    "hidden": "hidden_share",
    "always/ideal": "always_to_ideal",
    "always/pipeline": "always_to_pipeline",
    "auto/best": "auto_to_best",
    "auto split": "auto_split",
    "waited": "wait_share",
    "CPU, never": "never_cpu_ms",
    "CPU, always": "always_cpu_ms",
}


@dataclass(frozen=True)
class Target:
    """What the points that it concerns are to reach."""

    name: str
    concerns: Callable[[Point], bool]
    values: Callable[[Point], Sequence[float]]
    """Of a point; all are to be within the bounds."""
    low: float
    high: float

    def verdict(self, points: Sequence[Point]) -> Iterator[dict[str, Any]]:
        """How many points reach it, and the one that is the furthest from it."""
        values = [(value, point) for point in points if self.concerns(point) for value in self.values(point)]
        if values:
            missed = [(value, point) for value, point in values if not self.low <= value <= self.high]
            worst, where = max(values, key=lambda each: max(each[0] / self.high, self.low / max(each[0], 1e-9)))
            yield {
                "target": self.name,
                "verdict": "missed" if missed else "met",
                "values": len(values),
                "of them missed": len(missed),
                "worst": worst,
                "where": " ".join(f"{name}={where[name]}" for name in NAMES),
            }


def _sleeping(point: Point, ranks: int) -> bool:
    return bool(point["mode"] == "sleep" and point["ranks"] == ranks)


def _split(point: Point) -> bool:
    return bool(point["mode"] == "sleep" and point["ranks"] > 1)


def _hideable(point: Point) -> bool:
    """Where a hidden share is asked for."""
    return _split(point) and bool(point["transfer_ms"] >= max(2, 5 * point["delay_ms"]))


def _predictions(point: Point) -> list[float]:
    return [point[f"{policy}_predicted"] for policy in ("never", "always", "auto")]


TARGETS = (
    Target("split within 10% of ideal, 2 ranks", lambda p: _sleeping(p, 2), lambda p: [p["always_to_ideal"]], 0, 1.1),
    Target("split within 15% of ideal, 4 ranks", lambda p: _sleeping(p, 4), lambda p: [p["always_to_ideal"]], 0, 1.15),
    Target("split within 15% of pipeline", _split, lambda p: [p["always_to_pipeline"]], 0.85, 1.15),
    Target("hidden share, transfers of 2 ms and 5 delays", _hideable, lambda p: [p["hidden_share"]], 0.85, inf),
    Target("auto to the better of always and never", lambda p: p["ranks"] > 1, lambda p: [p["auto_to_best"]], 0, 1.03),
    Target("predicted to measured", lambda p: p["ranks"] > 1, _predictions, 0.85, 1.15),
    Target("waiting for plans", lambda _: True, lambda p: [p["wait_share"]], 0, 0.02),
)


def report(points: Sequence[Point], plot_file: Path | None = None) -> None:
    """Table and verdicts, on stderr and as JSON lines, and the plot if it is wanted."""
    columns = dict(zip(NAMES, NAMES, strict=True)) | FIGURES
    table([{title: point.get(name, "") for title, name in columns.items()} for point in points])
    verdicts = [verdict for target in TARGETS for verdict in target.verdict(points)]
    table(verdicts)
    for verdict in verdicts:
        emit(**verdict)
    if plot_file is not None:
        plot(list(filter(_split, points)), plot_file)


def plot(points: Sequence[Point], file: Path) -> None:
    """Step time against D for the three policies: a panel a link, a row of panels a number of ranks and a delay."""
    from matplotlib.figure import Figure

    rows = sorted({(point["ranks"], point["delay_ms"]) for point in points})
    columns = sorted({point["rate_mbit"] for point in points})
    figure = Figure(figsize=(max(3.2 * len(columns) + 0.6, 6.0), 2.4 * len(rows) + 0.8), layout="constrained")
    panels = figure.subplots(len(rows), len(columns), squeeze=False, sharex=True)
    styles = {"never": ("#4477aa", "o-"), "always": ("#cc6677", "s-"), "auto": ("#222222", "x--")}
    for (ranks, delay), line in zip(rows, panels, strict=True):
        for rate, panel in zip(columns, line, strict=True):
            own = [p for p in points if (p["ranks"], p["delay_ms"], p["rate_mbit"]) == (ranks, delay, rate)]
            own.sort(key=lambda point: point["D"])
            sizes = [point["D"] for point in own]
            panel.plot(sizes, [p["ideal_ms"] for p in own], ":", color="#aaaaaa", label="always, ideal")
            for policy, (color, style) in styles.items():
                panel.plot(sizes, [p[f"{policy}_ms"] for p in own], style, color=color, label=policy, markersize=4)
            panel.set_title(f"{ranks} ranks, {delay:g} ms, {rate:g} Mbit/s", fontsize=9)
            panel.set_xscale("log", base=2)
            panel.set_ylim(bottom=0)
            panel.set_xticks(sizes, [str(size) for size in sizes])
        line[0].set_ylabel("step, ms")
    for panel in panels[-1]:
        panel.set_xlabel("D")
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(file, dpi=110)


def read(files: Sequence[Path]) -> list[Point]:
    """The points in files of JSON lines."""
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [line for line in lines if "D" in line]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="overlap.report", description="Table, verdicts and plot of measured points.")
    parser.add_argument("files", type=Path, nargs="+", help="what `python -m overlap` printed")
    parser.add_argument("--plot", type=Path, help="write a PNG of step times here")
    options = parser.parse_args()
    report(read(options.files), options.plot)


if __name__ == "__main__":
    main()
