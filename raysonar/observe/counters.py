"""Counters and gauges of an engine as plain data."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raysonar.observe.answers import AnswerTotals


class Counters:
    """Totals since the engine started; they only grow."""

    def __init__(self, speculative_tokens: int) -> None:
        self.steps = 0
        self.split_steps = 0
        """Run as two micro-batches."""
        self.rank_seconds = 0.0
        """Of steps: waiting for a plan, verifying, drafting; of the slowest data-parallel row, as all seconds here."""
        self.wait_seconds = 0.0
        """Of them, waiting for a plan while there was something to do."""
        self.exposed_seconds = 0.0
        """Of them, blocked in waits for other ranks."""
        self.prompt_tokens = 0
        """Of prompts queued."""
        self.generated_tokens = 0
        """Given out: none after the one that ended its answer."""
        self.drafted: NDArray[np.int64] = np.zeros(speculative_tokens, np.int64)
        """[k]: draft tokens verified, by their position in the draft."""
        self.accepted: NDArray[np.int64] = np.zeros(speculative_tokens, np.int64)
        """[k]: of them, accepted."""
        self.preemptions = 0
        self.prefix_lookup_tokens = 0
        """Of admitted answers."""
        self.prefix_hit_tokens = 0
        """Of them, found in the prefix cache."""
        self.requests = 0
        self.aborted = 0
        self.recoveries = 0
        """Times that failed ranks were started again."""

    def __add__(self, other: "Counters") -> "Counters":
        """The totals of both, except of steps, which are the same ones."""
        total = Counters(len(self.drafted))
        for name, value in vars(self).items():
            setattr(total, name, value + getattr(other, name))
        total.steps = max(self.steps, other.steps)
        return total


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """An engine at one moment: gauges first, then totals since it started.

    pages_free + pages_referenced = pages; pages_cached are free ones whose contents the prefix cache can still use.
    """

    slots: int
    running: int
    waiting: int
    pages: int
    pages_free: int
    pages_referenced: int
    pages_cached: int
    steps_in_flight: int
    steps: int
    split_steps: int
    """Of them, run as two micro-batches."""
    rank_seconds: float
    """What the steps took the ranks: waiting for plans, verifying, drafting."""
    wait_seconds: float
    """Of it, waiting for plans while there was something to do."""
    exposed_seconds: float
    """Of it, blocked in waits for other ranks: communication that no computation hides."""
    requests: int
    aborted: int
    recoveries: int
    """Times that failed ranks were started again."""
    preemptions: int
    prompt_tokens: int
    generated_tokens: int
    prefix_lookup_tokens: int
    prefix_hit_tokens: int
    drafted: tuple[int, ...]
    accepted: tuple[int, ...]
    """By position in the draft, as `drafted`."""
    answers: AnswerTotals
    """What they took, and how they ended."""
