"""Step records: what each step computed and how long it took."""

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One step. Times are in seconds."""

    number: int
    rows: int
    prefill_tokens: int
    decode_tokens: int
    """Of decode rows, drafts too."""
    drafted: int
    accepted: int
    plan_seconds: float
    """The planner's."""
    verify_seconds: float
    """From the rank's taking the plan to its result."""
    draft_seconds: float
    """The draft run of the step before."""


class StepLog:
    """The last `size` step records."""

    def __init__(self, size: int = 1024) -> None:
        self._records: deque[StepRecord] = deque(maxlen=size)

    def append(self, record: StepRecord) -> None:
        """Keep a record; the oldest makes room."""
        self._records.append(record)

    def last(self, count: int | None = None) -> list[StepRecord]:
        """The last `count` records (None: all that are kept), oldest first."""
        records = list(self._records)
        return records if count is None else records[max(0, len(records) - count) :]
