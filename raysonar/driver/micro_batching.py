"""Decides, step by step, whether the ranks run it as one batch or as two halves."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from raysonar.config import MicroBatching
from raysonar.model.batch import half_tokens
from raysonar.moe.cost_model import CostModel
from raysonar.observe.steps import Reason
from raysonar.step import StepPlan

_TRIALS = ((1.1, 16), (1.3, 64))
"""An alternative that should take at most so many times as long as the better one is tried every so many steps: what
it takes shows only by running it."""
_SPEED_WEIGHT = 0.1
_CHANGE_WEIGHT = 0.2
_CLIP = 1.25
"""One step's news counts at most as if it had taken so many times longer or shorter than expected: most are hiccups."""


@dataclass(frozen=True)
class Decision:
    """How a step is run, and what is expected of it."""

    halves: int
    reason: Reason
    verify_seconds: float | None = None
    """Until its result; None when not profiled."""
    draft_seconds: float | None = None
    size: tuple[bool, int] | None = None
    """What is learnt from the step is kept for this size."""
    model_seconds: float = 0.0
    """What the cost model alone says of the step with its draft run."""


@dataclass
class _Size:
    """What steps of one size have shown."""

    speed: float
    """Measured over predicted time of an unsplit step, lately."""
    split: float
    """The same of a split step, as a multiple of `speed`."""
    steps: int = 0
    changes: int = 0
    halves: int | None = None
    """Of the latest step."""


@dataclass
class MicroBatcher:
    """The policy, the cost model and its corrections.

    A size is a number of tokens, rounded up to a power of two, with prefill in it or without. The model's predictions
    are corrected for each size by what its steps have taken: by one factor for all, which follows the machine, and by
    one for split steps, which only the first step after a change from split to unsplit or back moves: what lies between
    two neighbours is not the machine's.
    """

    policy: MicroBatching
    costs: CostModel | None = None
    _sizes: dict[tuple[bool, int], _Size] = field(default_factory=dict)

    def decide(self, plans: Sequence[StepPlan], rounds: int) -> tuple[Decision, NDArray[np.int64]]:
        """For a plan of each data-parallel row: the decision, and the plans' capacities."""
        if self.costs is None:
            reason = Reason.NOT_PROFILED if self.policy == "auto" else Reason.CONFIGURED
            return Decision(self._configured, reason), capacities(plans, rounds, self._configured)
        whole, in_halves = (capacities(plans, rounds, halves) for halves in (1, 2))
        decision = self._decide(self.costs, plans, whole.max(1).tolist(), in_halves.max(1).tolist())
        return decision, whole if decision.halves == 1 else in_halves

    @property
    def _configured(self) -> int:
        """The halves of a step that nothing is decided about."""
        return 2 if self.policy == "always" else 1

    def _decide(self, costs: CostModel, plans: Sequence[StepPlan], whole: list[int], in_halves: list[int]) -> Decision:
        decoding = sum(int((1 + plan.row_drafts)[plan.row_samples].sum()) for plan in plans)
        prefilling = sum(int(plan.row_tokens.sum()) for plan in plans) > 2 * decoding
        cost = costs.prefill if prefilling else costs.decode
        size = (prefilling, whole[0].bit_length())
        if (seen := self._sizes.get(size)) is None:
            speed, of_split = (cost.tried_ratio(halves, whole, in_halves) for halves in (1, 2))
            seen = self._sizes[size] = _Size(speed, of_split / speed)
        seen.steps += 1
        model = {1: cost.seconds(whole), 2: cost.seconds(whole, in_halves)}
        factor = {1: seen.speed, 2: seen.speed * seen.split}
        expected = {halves: sum(model[halves]) * factor[halves] for halves in (1, 2)}

        def decision(halves: int, reason: Reason) -> Decision:
            verify, draft = model[halves]
            return Decision(halves, reason, verify * factor[halves], draft * factor[halves], size, verify + draft)

        if self.policy != "auto":
            return decision(self._configured, Reason.CONFIGURED)
        if in_halves[0] == whole[0]:
            return decision(1, Reason.ONE_ROW)
        best = min(expected, key=lambda halves: expected[halves])
        other = 3 - best
        if any(seen.steps % every == 0 and expected[other] <= near * expected[best] for near, every in _TRIALS):
            return decision(other, Reason.TRIAL)
        if best == 2:
            return decision(2, Reason.GAIN)
        if cost.verify.weights_outweigh(whole[0], in_halves[0]):
            return decision(1, Reason.COMMUNICATION_TOO_SHORT)
        if cost.verify.latency_outweighs(whole[0]):
            return decision(1, Reason.COMPUTE_TOO_SHORT)
        return decision(1, Reason.NO_GAIN)

    def learn(self, decision: Decision, seconds: float) -> None:
        """Take in what a step took, with the draft run behind it."""
        if decision.size is None or not decision.model_seconds:
            return
        seen = self._sizes[decision.size]
        ratio = seconds / decision.model_seconds
        changed, seen.halves = seen.halves not in (None, decision.halves), decision.halves
        if changed:
            seen.changes += 1
            shown = ratio / seen.speed if decision.halves == 2 else seen.split * seen.speed / ratio
            weight = max(1 / (seen.changes + 1), _CHANGE_WEIGHT)
            seen.split += weight * (_clip(shown, seen.split) - seen.split)
            return
        if decision.halves == 2:
            ratio /= seen.split
        seen.speed += _SPEED_WEIGHT * (_clip(ratio, seen.speed) - seen.speed)


def capacities(plans: Sequence[StepPlan], rounds: int, halves: int) -> NDArray[np.int64]:
    """The most tokens of each data-parallel row in a half of each pass, [passes, rows]; see StepPlan."""
    return np.array([_of_row(plan, rounds, halves) for plan in plans], np.int64).T


def _of_row(plan: StepPlan, rounds: int, halves: int) -> list[int]:
    passes = [half_tokens(plan.row_tokens, halves)]
    for step in range(1, rounds):  # a token for each row that wants more than `step` drafts
        passes.append(half_tokens((plan.row_drafts > step).astype(np.int32), halves))
    return passes


def _clip(value: float, about: float) -> float:
    return min(max(value, about / _CLIP), about * _CLIP)
