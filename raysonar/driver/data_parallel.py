"""The data-parallel rows of a group: a scheduler each, stepping together."""

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from raysonar.driver.micro_batching import Decision, MicroBatcher
from raysonar.driver.pages import extend_keys
from raysonar.driver.recovery import PROVEN_TOKENS
from raysonar.driver.request import Answer
from raysonar.driver.scheduler import Scheduler, Step
from raysonar.observe.answers import AnswerTotals
from raysonar.observe.counters import Counters, EngineStats
from raysonar.step import StepPlan, StepResult, Tracing

_IMBALANCE = 2
"""Answers that a row may have more than the least loaded one and still be chosen for the prefix that it holds."""


class PlannedStep(NamedTuple):
    """A step that is ready for the ranks."""

    plans: list[StepPlan]
    """One for each data-parallel row."""
    decision: Decision
    traced: bool
    """Whether the ranks keep spans of it."""


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
        self.to_trace = 0.0
        """Of how many of the steps that are planned next the ranks keep spans; infinity: of all until it is 0 again."""
        self._suspects: deque[tuple[Answer, int]] = deque()
        """Answers that run alone, one after the other, each until it has so many tokens; the first runs now."""
        self._held: dict[Answer, None] = {}
        """Answers that wait until no suspect is left."""

    @property
    def waiting(self) -> int:
        """Answers that wait for a slot."""
        return sum(row.waiting for row in self.rows) + len(self._held)

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

    def stats(self, held_back: int, answers: AnswerTotals) -> EngineStats:
        """Gauges and totals of all rows; held_back: answers that wait elsewhere; answers: what they took."""
        counters = self.totals()
        return EngineStats(
            slots=sum(row.slots.total for row in self.rows),
            running=self.running,
            waiting=self.waiting + held_back,
            pages=sum(row.pages.total for row in self.rows),
            pages_free=sum(row.pages.free for row in self.rows),
            pages_referenced=sum(row.pages.referenced for row in self.rows),
            pages_cached=sum(row.pages.cached for row in self.rows),
            steps_in_flight=self.in_flight,
            steps=counters.steps,
            split_steps=counters.split_steps,
            rank_seconds=counters.rank_seconds,
            wait_seconds=counters.wait_seconds,
            exposed_seconds=counters.exposed_seconds,
            requests=counters.requests,
            aborted=counters.aborted,
            recoveries=counters.recoveries,
            preemptions=counters.preemptions,
            prompt_tokens=counters.prompt_tokens,
            generated_tokens=counters.generated_tokens,
            prefix_lookup_tokens=counters.prefix_lookup_tokens,
            prefix_hit_tokens=counters.prefix_hit_tokens,
            drafted=tuple(counters.drafted.tolist()),
            accepted=tuple(counters.accepted.tolist()),
            decisions=counters.decisions,
            expert_tokens=counters.expert_tokens,
            expert_imbalance=counters.expert_imbalance,
            answers=answers,
        )

    def totals(self) -> Counters:
        """The counters of the requests and of all rows, added up."""
        return sum((row.counters for row in self.rows), self.counters)

    @property
    def alone(self) -> Answer | None:
        """The answer that runs alone, under suspicion of making the ranks fail."""
        return self._suspects[0][0] if self._suspects else None

    def restart(self, suspects: Sequence[Answer]) -> None:
        """The ranks hold nothing any more, nothing runs or is queued; suspects are to run alone when they are again."""
        for row in self.rows:
            row.restart()
        self._suspects = deque((answer, len(answer.tokens) + PROVEN_TOKENS) for answer in suspects)
        self._held.clear()

    def add(self, answer: Answer) -> None:
        """Queue an answer."""
        if self._suspects and answer is not self.alone:
            self._held[answer] = None
        else:
            self._route(answer)

    def _route(self, answer: Answer) -> None:
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
        if answer in self._held:
            del self._held[answer]
            answer.finished = True
        else:
            self.rows[answer.data_rank].finish(answer)

    def _clear_suspects(self) -> None:
        """Let the next suspect run where the one that runs alone has come far enough, or all answers after the last."""
        while self._suspects and self._is_cleared(*self._suspects[0]):
            answer, _ = self._suspects.popleft()
            if not answer.finished:
                self.rows[answer.data_rank].withdraw(answer)
                self._held[answer] = None
            following = list(self._held) if self.alone is None else [self.alone]
            for each in following:
                if each in self._held:
                    del self._held[each]
                    self._route(each)

    def _is_cleared(self, answer: Answer, goal: int) -> bool:
        known = self.rows[answer.data_rank].slots.known
        return answer.finished or (answer.slot >= 0 and int(known[answer.slot]) >= goal)

    def schedule(self) -> PlannedStep | None:
        """The next step, or None when no row has anything to do."""
        self._clear_suspects()
        plans = [row.schedule() for row in self.rows]
        if all(plan is None for plan in plans):
            return None
        made = [plan or row.idle() for plan, row in zip(plans, self.rows, strict=True)]
        rounds = np.maximum.reduce([plan.draft_rounds for plan in made])
        number, every = int(made[0].number[0]), self._rebalance_steps
        decision, capacities = self.micro_batcher.decide(made, int(rounds[0]))
        traced = self.to_trace > 0
        self.to_trace -= traced
        common = {
            "halves": np.array([decision.halves]),
            "traced": np.array([Tracing.ON if traced else Tracing.OFF], np.int64),
            "capacities": capacities,
            "rebalance": np.array([bool(every and number and number % every == 0)], np.int64),
        }
        return PlannedStep([replace(plan, **common, draft_rounds=rounds) for plan in made], decision, traced)

    def commit(self, results: Sequence[StepResult]) -> list[Step]:
        """Take in the oldest outstanding step's results, one a row."""
        self.counters.count_experts(results[0].expert_tokens.tolist(), results[0].expert_imbalance.tolist())
        return [row.commit(result) for row, result in zip(self.rows, results, strict=True)]
