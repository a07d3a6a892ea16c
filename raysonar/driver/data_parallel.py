"""The data-parallel rows of a group: a scheduler each, stepping together."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from raysonar.driver.micro_batching import Decision, MicroBatcher
from raysonar.driver.pages import extend_keys
from raysonar.driver.request import Answer
from raysonar.driver.scheduler import Scheduler, Step
from raysonar.observe.counters import Counters
from raysonar.step import StepPlan, StepResult, Tracing

_IMBALANCE = 2
"""Answers that a row may have more than the least loaded one and still be chosen for the prefix that it holds."""


class PlannedStep(NamedTuple):
    """A step that is ready for the ranks."""

    plans: list[StepPlan]
    """One for each data-parallel row."""
    decision: Decision


class DataParallel:
    """Gives answers to rows, and makes one plan a row for every step.

    All ranks run every step, also those of a row with nothing to do: their experts serve the other rows' tokens.
    """

    def __init__(
        self, rows: Sequence[Scheduler], *, micro_batcher: MicroBatcher, rebalance_steps: int | None = None
    ) -> None:
        """rebalance_steps: how often the ranks place experts anew."""
        self.rows = rows
        self.counters = Counters(rows[0].speculative_tokens)
        """What is counted by the request; the rows count what is theirs."""
        self.micro_batcher = micro_batcher
        self._rebalance_steps = rebalance_steps
        self.tracing = False
        """Whether the ranks keep spans of the steps that are planned."""

    @property
    def waiting(self) -> int:
        """Answers that wait for a slot."""
        return sum(row.waiting for row in self.rows)

    @property
    def running(self) -> int:
        """Answers that hold a slot."""
        return sum(row.running for row in self.rows)

    @property
    def empty(self) -> int:
        """Slots that nothing holds."""
        return sum(row.slots.empty for row in self.rows)

    @property
    def in_flight(self) -> int:
        """Steps whose results are not in yet."""
        return self.rows[0].in_flight

    def totals(self) -> Counters:
        """The counters of the requests and of all rows, added up."""
        return sum((row.counters for row in self.rows), self.counters)

    def add(self, answer: Answer) -> None:
        """Queue an answer at the row that holds most of its prompt, among the rows with the least to do."""
        if len(self.rows) > 1:
            loads = [row.waiting + row.running for row in self.rows]
            few = [i for i, load in enumerate(loads) if load <= min(loads) + _IMBALANCE]
            extend_keys(answer.keys, answer.tokens, self.rows[0].page_size)
            held = [len(row.pages.match(answer.keys)) for row in self.rows]
            answer.data_rank = max(few, key=lambda i: (held[i], -loads[i]))
        self.rows[answer.data_rank].add(answer)

    def finish(self, answer: Answer) -> None:
        """Let go of an answer: its slot and pages are free at once."""
        self.rows[answer.data_rank].finish(answer)

    def schedule(self) -> PlannedStep | None:
        """The next step, or None when no row has anything to do."""
        plans = [row.schedule() for row in self.rows]
        if all(plan is None for plan in plans):
            return None
        made = [plan or row.idle() for plan, row in zip(plans, self.rows, strict=True)]
        rounds = np.maximum.reduce([plan.draft_rounds for plan in made])
        number, every = int(made[0].number[0]), self._rebalance_steps
        decision, capacities = self.micro_batcher.decide(made, int(rounds[0]))
        common = {
            "halves": np.array([decision.halves]),
            "traced": np.array([Tracing.ON if self.tracing else Tracing.OFF], np.int64),
            "capacities": capacities,
            "rebalance": np.array([bool(every and number and number % every == 0)], np.int64),
        }
        return PlannedStep([replace(plan, **common, draft_rounds=rounds) for plan in made], decision)

    def commit(self, results: Sequence[StepResult]) -> list[Step]:
        """Take in the oldest outstanding step's results, one a row."""
        return [row.commit(result) for row, result in zip(self.rows, results, strict=True)]
