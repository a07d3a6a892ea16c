"""What a draft is to its rank: it proposes tokens before a verification, and takes the verified batch in after it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from raysonar.model.batch import Batch
from raysonar.speculation.acceptance import propose
from raysonar.speculation.sampler import SamplingTable
from raysonar.step import Rule


@dataclass(frozen=True, kw_only=True)
class DraftRows:
    """The rows that want drafts, in packing order: D rows with at least one draft each."""

    host_slots: NDArray[np.int32]
    slots: torch.Tensor
    """int64 [D], the same on the device."""
    starts: torch.Tensor
    """int64 [D], computed tokens: token[start] is the last known one, the first draft is for start + 1."""
    page_table: torch.Tensor
    """int64 [D, pages]."""
    counts: NDArray[np.int32]
    """[D], drafts wanted."""
    bounds: NDArray[np.int32]
    """[D], upper bounds of the tokens computed when the step ends."""

    def take(self, index: NDArray[np.intp]) -> "DraftRows":
        """Some of the rows."""
        on_device = torch.from_numpy(index).to(self.slots.device)
        return DraftRows(
            host_slots=self.host_slots[index],
            slots=self.slots[on_device],
            starts=self.starts[on_device],
            page_table=self.page_table[on_device],
            counts=self.counts[index],
            bounds=self.bounds[index],
        )


@dataclass(frozen=True, kw_only=True)
class Verified:
    """A verified batch of T tokens, in packed order, S rows of which gained tokens."""

    batches: Sequence[Batch]
    """All of it, or its halves."""
    inputs: torch.Tensor
    """int64 [T], what the target computed: known tokens and drafts, accepted or not."""
    positions: torch.Tensor
    """int64 [T]."""
    token_slots: torch.Tensor
    """int64 [T], each token's slot."""
    hidden: torch.Tensor
    """[T, hidden], the target's, before its norm."""
    slots: torch.Tensor
    """int64 [S], the slots that gained tokens."""
    last: torch.Tensor
    """int64 [S], their last accepted places in the batch."""


class Draft(Protocol):
    """Drafts for the target, in lock-step with it. All ranks call the same methods in every step, rows or none."""

    def propose(
        self, rows: DraftRows, tokens: torch.Tensor, *, rounds: int, halves: int, capacities: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft, and write the drafts into the token table behind the known tokens.

        tokens: the token table, [slots, length]; rounds: the most drafts of any row on any rank, K; halves, capacities:
        the plan's. Returns the drafts, int64 [D, K], -1 where a row wants fewer than K; and the scores they were drawn
        from, fp32 [D, K, V], when a row is under the rejection rule, else None.
        """

    def refill(self, verified: Verified, tokens: torch.Tensor) -> None:
        """Take in what was accepted: after this, the draft's cache holds the entries of all computed tokens."""


class Proposal:
    """The drafts of one step in the making.

    Attributes:
        drafts, scores: as `Draft.propose` returns them.
        rows: those that want another draft.
    """

    def __init__(self, rows: DraftRows, tokens: torch.Tensor, rounds: int, sampling: SamplingTable) -> None:
        self.rows = rows
        self.drafts = rows.slots.new_full((len(rows.counts), rounds), -1)
        self.scores: torch.Tensor | None = None
        if (sampling.rules[rows.host_slots] == Rule.REJECTION).any():
            shape = (*self.drafts.shape, sampling.vocab)
            self.scores = torch.zeros(shape, dtype=torch.float32, device=tokens.device)
        self._tokens, self._sampling = tokens, sampling
        self._active = torch.arange(len(rows.counts), device=tokens.device)
        self._made = 0

    @property
    def latest(self) -> torch.Tensor:
        """int64 [rows], the draft made last of each of the rows."""
        return self.drafts[self._active, self._made - 1]

    def narrow(self) -> torch.Tensor | None:
        """Leave out rows that have what they want; the places of those left among the rows before, None if all are."""
        more = np.flatnonzero(self.rows.counts > self._made)
        if len(more) == len(self.rows.counts):
            return None
        left = torch.from_numpy(more).to(self._active.device)
        self.rows, self._active = self.rows.take(more), self._active[left]
        return left

    def add(self, logits: torch.Tensor) -> None:
        """Choose the rows' next drafts by the draft's logits, fp32 [rows, V]."""
        rows, made = self.rows, self._made
        sampling = self._sampling.rows(rows.host_slots, lambda: self.drafts[self._active, :made].tolist())
        positions = rows.starts + (made + 1)
        scores = sampling.scores(logits, positions, self._tokens)
        chosen = propose(sampling, scores, positions)
        self._tokens[rows.slots, positions] = chosen.to(self._tokens.dtype)
        self.drafts[self._active, made] = chosen
        if self.scores is not None:
            self.scores[self._active, made] = scores
        self._made += 1
