"""A plan's rows in packed order, as host arrays: everything of a step's shape that needs no look at the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from raysonar.model.batch import packing_order
from raysonar.step import StepPlan


@dataclass(frozen=True, kw_only=True)
class Layout:
    """R rows in packing order, S of which sample; N logit rows."""

    order: NDArray[np.intp]
    """[R]: the plan's row that stands here."""
    slots: NDArray[np.int32]
    tokens: NDArray[np.int32]
    bounds: NDArray[np.int32]
    drafts: NDArray[np.int32]
    ends: NDArray[np.int64]
    """[R]: where each row ends in the packed batch."""
    sampling: NDArray[np.intp]
    """[S]: the rows that sample."""
    logit_rows: NDArray[np.int64]
    """[N]: places in the packed batch whose logits are wanted: of each sampling row its last 1 + drafts tokens."""
    logit_slots: NDArray[np.int32]
    rounds: int
    """The most drafts of any row on any rank."""
    capacities: NDArray[np.int64]
    """[passes, data-parallel rows], as in the plan."""
    halves: int

    @classmethod
    def of(cls, plan: StepPlan, page_size: int) -> Self:
        """Lay a plan out."""
        order = packing_order(plan.row_tokens, plan.row_bound, page_size)
        slots, tokens, drafts = plan.row_slot[order], plan.row_tokens[order], plan.row_drafts[order]
        ends = np.cumsum(tokens, dtype=np.int64)
        sampling = np.flatnonzero(plan.row_samples[order])
        logits = 1 + drafts[sampling]
        offset = np.arange(logits.sum()) - np.repeat(np.cumsum(logits) - logits, logits)
        return cls(
            order=order,
            slots=slots,
            tokens=tokens,
            bounds=plan.row_bound[order],
            drafts=drafts,
            ends=ends,
            sampling=sampling,
            logit_rows=np.repeat(ends[sampling] - logits, logits) + offset,
            logit_slots=np.repeat(slots[sampling], logits),
            rounds=int(plan.draft_rounds[0]),
            capacities=plan.capacities,
            halves=int(plan.halves[0]),
        )

    def seen(self, drafts: Sequence[list[int]]) -> list[list[int]]:
        """Of each logit row, the drafts before it; drafts: of each sampling row, behind them whatever fills the row."""
        counts = self.drafts[self.sampling].tolist()
        return [made[:length] for made, count in zip(drafts, counts, strict=True) for length in range(count + 1)]

    @property
    def size(self) -> int:
        """Tokens in the packed batch."""
        return int(self.ends[-1]) if len(self.ends) else 0

    @property
    def longest(self) -> int:
        """Tokens that no row's text exceeds in this step, drafts and the new token included."""
        return int(self.bounds.max(initial=0)) + 1

    @property
    def width(self) -> int:
        """The most tokens that a row of any rank can gain."""
        return 1 + self.rounds
