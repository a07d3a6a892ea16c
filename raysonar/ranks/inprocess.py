"""A rank in the driver's own process."""

import gc
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

from raysonar.errors import EngineFailedError
from raysonar.observe.chrome import RankTimeline
from raysonar.observe.timeline import now
from raysonar.ranks.channel import RankInfo
from raysonar.ranks.rank import Rank
from raysonar.step import StepPlan


class InProcessChannel:
    """Runs a step when its result is asked for, and the draft of the step before first: the order of work of a rank of
    its own, without a thread that would fight the driver for the interpreter."""

    def __init__(self, build: Callable[[], tuple[Rank, RankInfo]]) -> None:
        """`build` loads the model; there is no rank before `restart`."""
        self._build = build
        self._rank: Rank | None = None
        self._plans: deque[bytes] = deque()
        self._free_since: int | None = None

    def restart(self) -> RankInfo:
        """Load the model, once the memory of the rank there was is free."""
        self.close()
        gc.collect()
        self._rank, info = self._build()
        self._free_since = None
        return info

    def check(self) -> None:
        """A rank that failed has said so in its step."""

    def send(self, plans: Sequence[bytes]) -> None:
        """Queue the one row's packed StepPlan."""
        [plan] = plans
        self._plans.append(plan)

    def receive(self, timeout: float) -> list[bytes]:
        """Work on the oldest plan; the time it takes is the step's own, so `timeout` is for an empty queue."""
        if self._rank is None:
            raise EngineFailedError("the rank's channel is closed")
        if not self._plans:
            raise TimeoutError("no plan is outstanding: send one before asking for its result")
        plan = StepPlan.unpack(self._plans.popleft())
        self._rank.timeline.plan_came(self._free_since)
        try:
            self._rank.draft()
            result = self._rank.verify(plan)
        except Exception as error:
            self._rank = None
            raise EngineFailedError(f"the rank failed in step {plan.number[0]}: {error}") from error
        self._free_since = now()
        return [result.pack()]

    def timelines(self, timeout: float) -> list[RankTimeline]:
        """The rank's; the draft of the last step is yet to run."""
        if self._rank is None:
            raise EngineFailedError("the rank's channel is closed")
        return [RankTimeline(host=socket.gethostname(), process=os.getpid(), spans=self._rank.timeline.take())]

    def close(self) -> None:
        """Let go of the rank and its memory."""
        self._rank = None
        self._plans.clear()
