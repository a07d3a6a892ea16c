"""Timelines of a group as one trace in Chrome's format, which Perfetto and chrome://tracing show.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU ("complete" and "metadata"
events).
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from raysonar.observe.timeline import Lane, Span


@dataclass(frozen=True, kw_only=True)
class RankTimeline:
    """What one rank has recorded."""

    host: str
    process: int
    spans: Sequence[Span]
    clock_offset: int = 0
    """Nanoseconds to add to its clock to get the one of all ranks."""


def write_trace(path: Path, ranks: Sequence[RankTimeline]) -> None:
    """The trace of one group as a file."""
    path.write_text(json.dumps(trace_of(ranks)))


def trace_of(*groups: Sequence[RankTimeline]) -> dict[str, object]:
    """One JSON object: a process a rank, a thread a lane, times in microseconds from each group's earliest span on."""
    events: list[dict[str, object]] = []
    processes = 0
    for ranks in groups:
        starts = [span.start + rank.clock_offset for rank in ranks for span in rank.spans]
        for number, rank in enumerate(ranks):
            events += _events(processes + number, number, rank, min(starts, default=0))
        processes += len(ranks)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(process: int, number: int, rank: RankTimeline, origin: int) -> Iterator[dict[str, object]]:
    yield _metadata("process_name", process, 0, name=f"rank {number} ({rank.host}, process {rank.process})")
    yield _metadata("process_sort_index", process, 0, sort_index=process)
    for lane in sorted({span.lane for span in rank.spans}):
        yield _metadata("thread_name", process, lane, name=lane.title)
        yield _metadata("thread_sort_index", process, lane, sort_index=int(lane))
    for span in rank.spans:
        yield {
            "name": span.name,
            "cat": span.kind,
            "ph": "X",
            "pid": process,
            "tid": int(span.lane),
            "ts": (span.start + rank.clock_offset - origin) / 1000,
            "dur": (span.end - span.start) / 1000,
            "args": {"step": span.step} | ({} if span.layer is None else {"layer": span.layer}),
        }


def _metadata(kind: str, process: int, thread: Lane | int, **arguments: object) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": process, "tid": int(thread), "args": arguments}
