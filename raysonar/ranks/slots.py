"""What a rank keeps of each running request."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raysonar.step import SAMPLING, StepPlan


class SlotTable:
    """Token table, computed lengths and page tables on the device; sampling records on the host."""

    def __init__(self, slots: int, max_tokens: int, pages_per_slot: int, device: torch.device) -> None:
        """max_tokens: known tokens and drafts of a slot at the most."""
        self.device = device
        self.tokens = torch.zeros((slots, max_tokens), dtype=torch.int32, device=device)
        """Each slot's text: the known tokens, and behind them drafts or left-overs."""
        self.computed = torch.zeros(slots, dtype=torch.int64, device=device)
        """Tokens whose cache entries are written."""
        self.page_table = torch.zeros((slots, pages_per_slot), dtype=torch.int64, device=device)
        self.records: NDArray[Any] = np.zeros(slots, SAMPLING)

    def update(self, plan: StepPlan) -> None:
        """Take in the plan's admissions and new pages."""
        if plan.admitted_slot.size:
            self._admit(plan)
        if plan.page_slot.size:
            place = (self._upload(plan.page_slot), self._upload(plan.page_index))
            self.page_table[place] = self._upload(plan.page)

    def _admit(self, plan: StepPlan) -> None:
        slots = self._upload(plan.admitted_slot)
        lengths = plan.admitted_length
        row = np.repeat(plan.admitted_slot, lengths)
        column = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        tokens = self._upload(plan.admitted_tokens).to(torch.int32)
        self.tokens[self._upload(row), self._upload(column)] = tokens
        self.computed[slots] = self._upload(plan.admitted_cached)
        self.records[plan.admitted_slot] = plan.admitted_sampling

    def _upload(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self.device, non_blocking=True)
