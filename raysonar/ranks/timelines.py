"""Fetches what the ranks of a group have recorded, and puts it on one clock."""

import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray

from raysonar.errors import EngineFailedError
from raysonar.observe.chrome import RankTimeline
from raysonar.observe.timeline import now

_PINGS = 8


def collect_timelines(
    actors: Sequence[Any], processes: Sequence[tuple[str, int]], timeout: float
) -> list[RankTimeline]:
    """The timelines of rank actors, on this process's clock; processes: (host name, process id) of each.

    Raises EngineFailedError when a rank does not answer within `timeout` seconds, or is gone.
    """
    actors = list(actors)  # ranks that fail meanwhile are taken out of it
    if len(actors) != len(processes):
        raise EngineFailedError("the ranks are gone, or are being started again")
    deadline = time.monotonic() + timeout

    def get(calls: Any) -> Any:
        return ray.get(calls, timeout=max(deadline - time.monotonic(), 0.0))

    def offset(actor: Any, host: str) -> int:
        return 0 if host == socket.gethostname() else clock_offset(lambda: int(get(actor.clock.remote())))

    try:
        recorded = get([actor.take_spans.remote() for actor in actors])
        offsets = [offset(actor, host) for actor, (host, _) in zip(actors, processes, strict=True)]
    except ray.exceptions.GetTimeoutError:
        raise EngineFailedError(f"the ranks did not hand out their timelines within {timeout:.0f} s") from None
    except ray.exceptions.RayError as error:
        raise EngineFailedError(f"a rank does not hand out its timeline: {error}") from error
    return [
        RankTimeline(host=host, process=process, spans=spans, clock_offset=offset)
        for (host, process), spans, offset in zip(processes, recorded, offsets, strict=True)
    ]


def clock_offset(read: Callable[[], int]) -> int:
    """Nanoseconds to add to another host's clock to get this one's: the fastest of some round trips, halved.

    The error is at most half of that round trip.
    """
    best: tuple[int, int] | None = None
    for _ in range(_PINGS):
        began = now()
        other = read()
        ended = now()
        trip = (ended - began, (began + ended) // 2 - other)
        best = trip if best is None else min(best, trip)
    assert best is not None
    return best[1]
