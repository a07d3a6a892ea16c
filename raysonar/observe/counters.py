"""Counters and gauges of an engine as plain data."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from raysonar.observe.answers import AnswerTotals
from raysonar.observe.steps import Decisions


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
        self.decisions = Decisions()
        self.expert_tokens: Counter[str] = Counter()
        """By rank; counted each time that experts are placed anew."""
        self.expert_imbalance = 0.0
        """The last time: see StepResult. Not a total, but counted in one place only."""
        self.requests = 0
        self.aborted = 0
        self.recoveries = 0
        """Times that failed ranks were started again."""

    def count_experts(self, tokens: Sequence[float], imbalance: Sequence[float]) -> None:
        """What StepResult says of them; nothing in most steps."""
        for rank, had in enumerate(tokens):
            self.expert_tokens[str(rank)] += round(had)
        for each in imbalance:
            self.expert_imbalance = each

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
    decisions: Decisions
    expert_tokens: Mapping[str, int]
    """That each rank's experts had, in all layers, until they were last placed anew."""
    expert_imbalance: float
    """Until then, the busiest rank's over the mean, in the layer where that is worst; 0 before the first time."""
    answers: AnswerTotals
    """What they took, and how they ended."""
