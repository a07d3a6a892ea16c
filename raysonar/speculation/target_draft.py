"""Drafting with a small dense model, in lock-step with the target: the two share page tables and batches.

The model's entry for position i stands in a cache of its own, in the page and at the place where the target's is. It is
made of the text's tokens up to i and of nothing else. Each draft runs the model on one more token, the first on the
last known one. That leaves out the last draft's own entry, and prompts: so after each verification the model also runs
over the verified batch, as it is. A rejected token's entry is overwritten when its position comes up again.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from raysonar.model.batch import pack
from raysonar.model.cache import KvCache
from raysonar.model.transformer import Transformer
from raysonar.moe.communicator import Communicator
from raysonar.moe.executor import run
from raysonar.speculation.draft import Draft, DraftRows, Proposal, Verified
from raysonar.speculation.sampler import SamplingTable
from raysonar.step import Rule


class TargetDraft:
    """A whole dense model on this rank, with the target's vocabulary; it waits for no other rank."""

    def __init__(self, model: Transformer, cache: KvCache, sampling: SamplingTable) -> None:
        """cache: the model's own, with as many pages of the same size as the target's, in the same dtype."""
        self._model, self._cache, self._sampling = model, cache, sampling

    def propose(
        self, rows: DraftRows, tokens: torch.Tensor, *, rounds: int, halves: int, capacities: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `Draft.propose`; there is nothing to wait for, so nothing is split."""
        proposal = Proposal(rows, tokens, rounds, self._sampling)
        for step in range(int(rows.counts.max(initial=0))):
            proposal.narrow()
            proposal.add(self._next(proposal.rows, tokens, step))
        return proposal.drafts, proposal.scores

    def refill(self, verified: Verified, tokens: torch.Tensor) -> None:
        """Run over the verified batch: prompts, and the last drafts."""
        inputs = verified.inputs.split_with_sizes([len(batch.positions) for batch in verified.batches])
        run([self._model(*each, self._cache) for each in zip(inputs, verified.batches, strict=True)])

    def _next(self, rows: DraftRows, tokens: torch.Tensor, step: int) -> torch.Tensor:
        """The logits that follow each row's token at start + step, fp32 [rows, V]."""
        positions = rows.starts + step
        [batch] = pack(
            np.ones_like(rows.counts),
            rows.bounds,
            positions,
            rows.page_table,
            page_size=self._cache.page_size,
            dtype=self._model.dtype,
        )
        [hidden] = run([self._model(tokens[rows.slots, positions].long(), batch, self._cache)])
        return self._model.logits(hidden)


class LedDraft:
    """A draft that only the first rank of a data-parallel row has: it tells the others what it proposes.

    Acceptance is then computed by all ranks of the row alike, from the same drafts and, where the rejection rule asks
    for them, the same scores.
    """

    def __init__(self, own: Draft | None, sampling: SamplingTable, communicator: Communicator) -> None:
        """own: the draft, on the row's first rank; None on the others."""
        self._own, self._sampling, self._communicator = own, sampling, communicator

    def propose(
        self, rows: DraftRows, tokens: torch.Tensor, *, rounds: int, halves: int, capacities: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As `Draft.propose`."""
        if self._own is not None:
            drafts, scores = self._own.propose(rows, tokens, rounds=rounds, halves=halves, capacities=capacities)
        else:
            blank = Proposal(rows, tokens, rounds, self._sampling)
            drafts, scores = blank.drafts, blank.scores
        self._communicator.broadcast_over_row(drafts)
        self._share_scores(rows, scores, drafts)
        if self._own is None:  # who has proposed them has written them, too
            _write(rows, drafts, tokens)
        return drafts, scores

    def refill(self, verified: Verified, tokens: torch.Tensor) -> None:
        """As `Draft.refill`."""
        if self._own is not None:
            self._own.refill(verified, tokens)

    def _share_scores(self, rows: DraftRows, scores: torch.Tensor | None, drafts: torch.Tensor) -> None:
        """Those of rows under the rejection rule; every rank calls the collective, also where there are none."""
        if scores is None:
            self._communicator.broadcast_over_row(drafts.new_empty(0))
            return
        rejecting = np.flatnonzero(self._sampling.rules[rows.host_slots] == Rule.REJECTION)
        index = torch.from_numpy(rejecting).to(scores.device)
        scores[index] = self._communicator.broadcast_over_row(scores[index])


def _write(rows: DraftRows, drafts: torch.Tensor, tokens: torch.Tensor) -> None:
    """Put the drafts into the token table behind the known tokens."""
    row, number = np.nonzero(np.arange(drafts.shape[1]) < rows.counts[:, None])
    of, at = (torch.from_numpy(each).to(drafts.device) for each in (row, number))
    tokens[rows.slots[of], rows.starts[of] + 1 + at] = drafts[of, at].to(tokens.dtype)
