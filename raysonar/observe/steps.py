"""Step records: what each step computed and how long it took."""

from collections import Counter, deque
from dataclasses import dataclass
from enum import StrEnum

KEPT_STEPS = 1024
"""Whose records an engine has."""


class Reason(StrEnum):
    """Why a step is split, or is not."""

    CONFIGURED = "configured"
    NOT_PROFILED = "not profiled"
    """There is no cost model: tokens do not travel to their experts, or it was not asked for."""
    GAIN = "gain"
    """Two halves should take less time."""
    ONE_ROW = "one row"
    """The rows cannot be cut into two halves."""
    COMMUNICATION_TOO_SHORT = "communication too short"
    """It takes less time than reading the weights a second time."""
    COMPUTE_TOO_SHORT = "compute too short"
    """It takes less time than a latency."""
    NO_GAIN = "no gain"
    """Communication could hide, but layers without experts, the fill, or what steps have measured outweigh it."""
    TRIAL = "trial"
    """To see what the alternative takes, which should be about as good."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step of all ranks. Times are in seconds, each the longest of any data-parallel row."""

    number: int
    rows: int
    prefill_tokens: int
    decode_tokens: int
    """Of decode rows, drafts too."""
    drafted: int
    accepted: int
    halves: int
    """2 when it ran as two micro-batches, else 1."""
    reason: Reason
    predicted_seconds: float | None
    """What the cost model, corrected by steps before, expected of `verify_seconds` and `draft_seconds` together; None
    when there is none."""
    plan_seconds: float
    """The planner's."""
    wait_seconds: float
    """That a rank had nothing to do for want of the plan; 0 when the engine had nothing to do."""
    verify_seconds: float
    """From the rank's taking the plan to its result."""
    verify_exposed_seconds: float
    """Of it, blocked in waits for other ranks: communication that no computation hides."""
    draft_seconds: float
    """The draft run of the step before."""
    draft_exposed_seconds: float
    """Of it, blocked in waits for other ranks."""

    @property
    def exposed_seconds(self) -> float:
        """Communication that no computation hides."""
        return self.verify_exposed_seconds + self.draft_exposed_seconds

    @property
    def seconds(self) -> float:
        """From the rank's having finished the step before the last to its having finished the last: all its time."""
        return self.wait_seconds + self.verify_seconds + self.draft_seconds

    @property
    def wait_share(self) -> float:
        """The part of the rank's time that it waited for a plan, 0 to 1."""
        return self.wait_seconds / self.seconds


class Decisions:
    """Totals of what was decided and expected of steps."""

    def __init__(self) -> None:
        self.reasons: Counter[str] = Counter()
        """Steps, by why they were split, or were not."""
        self.predicted_seconds = 0.0
        """Expected of steps, where the cost model expected something."""
        self.measured_seconds = 0.0
        """That those steps took."""
        self.error_seconds = 0.0
        """The differences, each without its sign."""

    def count(self, record: StepRecord) -> None:
        """Add a step."""
        self.reasons[record.reason] += 1
        if record.predicted_seconds is not None:
            measured = record.verify_seconds + record.draft_seconds
            self.predicted_seconds += record.predicted_seconds
            self.measured_seconds += measured
            self.error_seconds += abs(record.predicted_seconds - measured)

    def __add__(self, other: "Decisions") -> "Decisions":
        total = Decisions()
        for name, value in vars(self).items():
            setattr(total, name, value + getattr(other, name))
        return total


class StepLog:
    """The last `size` step records."""

    def __init__(self, size: int = KEPT_STEPS) -> None:
        self._records: deque[StepRecord] = deque(maxlen=size)

    def append(self, record: StepRecord) -> None:
        """Keep a record; the oldest makes room."""
        self._records.append(record)

    def last(self, count: int | None = None) -> list[StepRecord]:
        """The last `count` records (None: all that are kept), oldest first."""
        records = list(self._records)
        return records if count is None else records[max(0, len(records) - count) :]
