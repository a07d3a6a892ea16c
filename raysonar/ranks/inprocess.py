"""A rank in the driver's own process."""

from collections import deque
from collections.abc import Sequence

from raysonar.errors import EngineFailedError
from raysonar.ranks.rank import Rank
from raysonar.step import StepPlan


class InProcessChannel:
    """Runs a step when its result is asked for, and the draft of the step before first: the order of work of a rank of
    its own, without a thread that would fight the driver for the interpreter."""

    def __init__(self, rank: Rank) -> None:
        self._rank: Rank | None = rank
        self._plans: deque[bytes] = deque()

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
        try:
            self._rank.draft()
            return [self._rank.verify(plan).pack()]
        except Exception as error:
            self._rank = None
            raise EngineFailedError(f"the rank failed in step {plan.number[0]}: {error}") from error

    def close(self) -> None:
        """Let go of the rank and its memory."""
        self._rank = None
        self._plans.clear()
