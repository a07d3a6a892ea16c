"""A plot of latencies."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from raysonar.bench.records import Record
from raysonar.bench.report import LATENCIES, latencies
from raysonar.errors import ConfigurationError


def check_plot(file: Path) -> None:
    """Raises ConfigurationError when `file` could not be drawn in the end."""
    _matplotlib()
    if file.suffix != ".png":
        raise ConfigurationError(f"a plot is a .png, not {file}")
    if not file.absolute().parent.is_dir():
        raise ConfigurationError(f"there is no folder {file.absolute().parent} for the plot")


def write_plot(file: Path, records: Sequence[Record], figures: Mapping[str, Any]) -> None:
    """How latencies are distributed, each with its median and 99th percentile, as a PNG."""
    figure_type = _matplotlib()
    times = {name: values for name, values in latencies(records).items() if values}
    figure = figure_type(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    for axis, (name, meaning) in zip(axes.flat, LATENCIES.items(), strict=True):
        axis.set_title(f"{meaning} ({name})")
        axis.set_xlabel("ms")
        axis.set_ylabel("share of requests" if name != "itl" else "share of pieces")
        axis.grid(alpha=0.3)
        if name not in times:
            continue
        values = np.sort(np.asarray(times[name]))
        axis.step(values, np.arange(1, len(values) + 1) / len(values), where="post")
        for place, style in ((50, ":"), (99, "--")):
            value = float(np.percentile(values, place))
            axis.axvline(value, linestyle=style, color="gray", label=f"p{place}: {value:.1f} ms")
        axis.legend(loc="lower right")
    figure.suptitle(
        f"{figures['requests']} requests, {figures['failed']} failed; {figures['requests_per_s']:.2f} requests/s, "
        f"{figures['tokens_per_s']:.0f} tokens/s"
    )
    figure.savefig(file, dpi=120)


def _matplotlib() -> Any:
    """A figure without a screen."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigurationError("a plot needs matplotlib: install raysonar[plot]") from error
    return Figure
