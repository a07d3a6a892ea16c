"""Where a rank's time goes: waits for other ranks are always summed up; every span is kept while a step is traced.

Times are of `time.perf_counter_ns`, which on Linux is CLOCK_MONOTONIC: one clock for all processes of a host.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import IntEnum
from typing import Literal, NamedTuple

now = time.perf_counter_ns
KEPT_SPANS = 1_000_000
"""Of each track; the oldest make room."""


class Lane(IntEnum):
    """What runs side by side on one rank, and the order in which it is shown."""

    STEP = 0
    HALF_0 = 1
    TRANSFERS_0 = 2
    HALF_1 = 3
    TRANSFERS_1 = 4

    @property
    def title(self) -> str:
        """As shown."""
        return self.name.lower().replace("_", " ")


Kind = Literal["work", "wait", "transfer"]
"""Computing; blocked for want of a plan or of other ranks; on its way to and from other ranks."""


class Span(NamedTuple):
    """Something that took time."""

    name: str
    kind: Kind
    start: int
    """Nanoseconds."""
    end: int
    lane: Lane
    step: int
    layer: int | None
    """None for what belongs to no layer."""


class _Measured:
    """Keeps a span of the `with` block."""

    __slots__ = ("_began", "_name", "_track")

    def __init__(self, track: "Track", name: str) -> None:
        self._track, self._name = track, name

    def __enter__(self) -> None:
        self._began = self._track.clock()

    def __exit__(self, *_: object) -> None:
        self._track.keep(self._name, "work", self._began, self._track.clock())


class _Waiting(_Measured):
    """Adds the time of the `with` block to what the track has waited."""

    __slots__ = ()

    def __exit__(self, *_: object) -> None:
        ended = self._track.clock()
        self._track.waited += ended - self._began
        self._track.keep(self._name, "wait", self._began, ended)


_UNMEASURED = nullcontext()


class Track:
    """One strand of a rank's work, a half of the steps or what frames them, with its transfers.

    Attributes:
        waited: nanoseconds blocked in waits for other ranks, ever.
        tracing: whether spans are kept.
        settle: waits until the device has done what it was given, while spans are to be the device's times.
        step, layer: what new spans belong to.
    """

    def __init__(self, lane: Lane = Lane.HALF_0) -> None:
        self.waited = 0
        self.tracing = False
        self.settle: Callable[[], None] | None = None
        self.step = -1
        self.layer: int | None = None
        self.lane = lane
        self._spans: deque[Span] = deque(maxlen=KEPT_SPANS)

    def clock(self) -> int:
        """Nanoseconds now, or once the device has settled."""
        if self.settle is not None:
            self.settle()
        return now()

    def span(self, name: str) -> AbstractContextManager[None]:
        """Keep the `with` block as a span; costs next to nothing while nothing is traced."""
        return _Measured(self, name) if self.tracing else _UNMEASURED

    def waiting(self, name: str) -> AbstractContextManager[None]:
        """A `with` block that waits for other ranks: its time is added to `waited`, and kept as a span."""
        return _Waiting(self, name)

    def keep(self, name: str, kind: Kind, start: int, end: int) -> None:
        """Keep a span while tracing."""
        if self.tracing:
            lane = Lane(self.lane + 1) if kind == "transfer" else self.lane
            self._spans.append(Span(name, kind, start, end, lane, self.step, self.layer))

    def take(self) -> list[Span]:
        """The spans kept since they were last taken, in the order of their ends."""
        spans, self._spans = self._spans, deque(maxlen=KEPT_SPANS)
        return list(spans)


class Timeline:
    """All tracks of one rank."""

    def __init__(self, halves: Sequence[Track], settle: Callable[[], None] | None = None) -> None:
        """halves: the tracks of the steps' two halves; settle: waits for the device, where there is one to wait for."""
        self.frame = Track(Lane.STEP)
        """Of what is done for both halves together."""
        self.plan_wait = 0
        """Nanoseconds that the rank had nothing to do for want of the plan it has now."""
        self._halves, self._settle = halves, settle
        for track, lane in zip(halves, (Lane.HALF_0, Lane.HALF_1), strict=True):
            track.lane = lane

    @property
    def waited(self) -> int:
        """Nanoseconds blocked in waits for other ranks, ever."""
        return sum(track.waited for track in self._halves)

    def plan_came(self, idle_since: int | None) -> None:
        """The next plan is there; the rank waited for it from `idle_since` on, or not at all."""
        self.plan_wait = 0
        if idle_since is not None:
            came = now()
            self.plan_wait = came - idle_since
            self.frame.keep("wait for plan", "wait", idle_since, came)

    def begin(self, step: int, *, traced: bool, settled: bool = False) -> None:
        """A step begins: what comes until the next one belongs to it, and its spans are kept when it is traced."""
        for track in (self.frame, *self._halves):
            track.tracing, track.step, track.layer = traced, step, None
            track.settle = self._settle if settled else None

    def take(self) -> list[Span]:
        """The spans of all tracks since they were last taken."""
        return [span for track in (self.frame, *self._halves) for span in track.take()]
