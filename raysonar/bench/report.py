"""From records to figures."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raysonar.bench.records import Record
from raysonar.errors import ConfigurationError

PERCENTILES = (50, 90, 95, 99)
LATENCIES = {
    "ttft": "time to first token",
    "itl": "between pieces of text",
    "tpot": "per token after the first",
    "e2e": "whole answer",
}


@dataclass(frozen=True)
class Objectives:
    """What a good answer takes at the most, in milliseconds: a subset of ttft, tpot and e2e."""

    limits: Mapping[str, float]

    @classmethod
    def parse(cls, words: Sequence[str]) -> "Objectives":
        """From `ttft=200` and the like. Raises ConfigurationError."""
        limits: dict[str, float] = {}
        for word in words:
            name, _, value = word.partition("=")
            try:
                limits[name] = float(value)
            except ValueError:
                limits[name] = -1.0
            if name not in ("ttft", "tpot", "e2e") or not limits[name] > 0:
                raise ConfigurationError(f"an objective is ttft=MS, tpot=MS or e2e=MS, not {word!r}")
        return cls(limits)

    def met(self, record: Record) -> bool:
        """Whether an answer meets all. One that has no such time (an answer of one token has no tpot) meets that."""
        times = {"ttft": record.first, "tpot": record.per_token, "e2e": record.seconds}
        return record.error is None and all(
            (time := times[name]) is None or 1000 * time <= limit for name, limit in self.limits.items()
        )


def latencies(records: Sequence[Record]) -> dict[str, list[float]]:
    """Milliseconds, by LATENCIES' names, of the answers that came."""
    good = [record for record in records if record.error is None]
    times = {
        "ttft": [record.first for record in good if record.first is not None],
        "itl": [gap for record in good for gap in record.gaps],
        "tpot": [time for record in good if (time := record.per_token) is not None],
        "e2e": [record.seconds for record in good],
    }
    return {name: [1000 * value for value in values] for name, values in times.items()}


def report(records: Sequence[Record], objectives: Objectives) -> dict[str, Any]:
    """All figures as plain data: rates per second, latencies in milliseconds."""
    good = [record for record in records if record.error is None]
    seconds = max((record.due + record.seconds for record in records), default=0.0)
    begun = min((record.due for record in records), default=0.0)
    lasted = max(seconds - begun, 1e-9)
    tokens, drafted = sum(record.tokens for record in good), sum(record.drafted for record in good)
    figures: dict[str, Any] = {
        "requests": len(records),
        "failed": len(records) - len(good),
        "errors": dict(Counter(record.error for record in records if record.error is not None).most_common(5)),
        "seconds": lasted,
        "prompt_tokens": sum(record.prompt_tokens for record in good),
        "completion_tokens": tokens,
        "requests_per_s": len(good) / lasted,
        "tokens_per_s": tokens / lasted,
        "total_tokens_per_s": (tokens + sum(record.prompt_tokens for record in good)) / lasted,
        "acceptance": sum(record.accepted for record in good) / drafted if drafted else None,
        "latency_ms": {name: _spread(values) for name, values in latencies(records).items()},
    }
    if objectives.limits:
        met = sum(map(objectives.met, records))
        figures["goodput"] = {
            "objectives_ms": dict(objectives.limits),
            "requests": met,
            "requests_per_s": met / lasted,
            "share": met / len(records) if records else 0.0,
        }
    return figures


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    numbers = np.asarray(values)
    percentiles = zip(PERCENTILES, np.percentile(numbers, PERCENTILES).tolist(), strict=True)
    return {
        "mean": float(numbers.mean()),
        **{f"p{place}": value for place, value in percentiles},
        "max": float(numbers.max()),
    }


def text(figures: Mapping[str, Any]) -> str:
    """The figures for people."""
    lines = [
        f"{figures['requests']} requests in {figures['seconds']:.1f} s, {figures['failed']} failed: "
        f"{figures['requests_per_s']:.2f} requests/s, {figures['tokens_per_s']:.1f} tokens/s"
    ]
    lines += [f"  {count} x {error}" for error, count in figures["errors"].items()]
    if figures["acceptance"] is not None:
        lines.append(f"{figures['acceptance']:.1%} of drafts accepted")
    if "goodput" in figures:
        good = figures["goodput"]
        wanted = ", ".join(f"{name} {limit:g} ms" for name, limit in good["objectives_ms"].items())
        lines.append(f"{good['requests_per_s']:.2f} requests/s ({good['share']:.0%}) within {wanted}")
    heads = ["mean", *(f"p{place}" for place in PERCENTILES), "max"]
    lines.append(f"{'ms':>30}" + "".join(f"{head:>10}" for head in heads))
    for name, meaning in LATENCIES.items():
        spread = figures["latency_ms"][name]
        if spread is not None:
            lines.append(f"{f'{meaning} ({name})':>30}" + "".join(f"{spread[head]:>10.1f}" for head in heads))
    return "\n".join(lines)
