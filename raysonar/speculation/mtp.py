"""Drafting with a multi-token-prediction module, in lock-step with the target.

The module's entry for position i stands in the target's page at the same place and is made of the target's hidden
state of i and the embedding of token i + 1. After each verification it runs once over the whole verified batch,
shifted left by one token: that fills its entries with the target's own hidden states, and its output at the last
accepted position is carried over as the first draft's logits. Further drafts of a step feed on the module's own hidden
states; the entries that they write are overwritten when their tokens are verified.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from raysonar.model.batch import Batch, pack
from raysonar.model.cache import KvCache
from raysonar.model.mtp import MtpModule
from raysonar.model.transformer import Transformer
from raysonar.moe.executor import run
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


class MtpDraft:
    """The module and what it carries from step to step, per slot."""

    def __init__(
        self,
        target: Transformer,
        module: MtpModule,
        cache: KvCache,
        sampling: SamplingTable,
        *,
        slots: int,
        post_norm: bool,
        recycle_post_norm: bool,
    ) -> None:
        """post_norm: feed hidden states after the target's final norm; recycle_post_norm: after the module's own."""
        self._target, self._module, self._cache, self._sampling = target, module, cache, sampling
        self._post_norm, self._recycle_post_norm = post_norm, recycle_post_norm
        spec, device = target.spec, target.rotation.device
        self._logits = torch.zeros((slots, spec.vocab), device=device)
        self._hidden = torch.zeros((slots, spec.hidden), dtype=target.dtype, device=device)

    def propose(
        self, rows: DraftRows, tokens: torch.Tensor, *, rounds: int, halves: int, capacities: NDArray[np.int64]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Draft, and write the drafts into the token table behind the known tokens.

        tokens: the token table, [slots, length]; rounds: the most drafts of any row on any rank, K. Every rank runs the
        module K - 1 times, with rows or without; capacities: the plan's. Returns the drafts, int64 [D, K], -1 where a
        row wants fewer than K; and the scores they were drawn from, fp32 [D, K, V], when a row is under the rejection
        rule, else None.
        """
        drafts = rows.slots.new_full((len(rows.counts), rounds), -1)
        kept = None
        if (self._sampling.rules[rows.host_slots] == Rule.REJECTION).any():
            kept = self._logits.new_zeros((*drafts.shape, self._logits.shape[1]))
        logits, hidden = self._logits[rows.slots], self._hidden[rows.slots]
        active = torch.arange(len(drafts), device=drafts.device)
        for step in range(rounds):
            if step:
                more = np.flatnonzero(rows.counts > step)
                if len(more) < len(rows.counts):
                    rows, on_device = rows.take(more), torch.from_numpy(more).to(drafts.device)
                    hidden, active = hidden[on_device], active[on_device]
                logits, hidden = self._extend(
                    rows, drafts[active, step - 1], hidden, step - 1, halves, capacities[step]
                )
            sampling = self._sampling.rows(rows.host_slots)
            positions = rows.starts + (step + 1)
            scores = sampling.scores(logits, positions, tokens)
            chosen = propose(sampling, scores, positions)
            tokens[rows.slots, positions] = chosen.to(tokens.dtype)
            drafts[active, step] = chosen
            if kept is not None:
                kept[active, step] = scores
        return drafts, kept

    def refill(
        self,
        tokens: torch.Tensor,
        hidden: torch.Tensor,
        batches: Sequence[Batch],
        slots: torch.Tensor,
        last: torch.Tensor,
    ) -> None:
        """Run over the verified batch, and carry what follows each row's last accepted position.

        tokens: int64 [T], the batch's tokens shifted left by one; hidden: the target's, before its norm, [T, hidden];
        slots: int64 [R], the rows to carry for; last: int64 [R], their last accepted positions in the packed batch.
        """
        out = self._run(tokens, self._target.norm(hidden) if self._post_norm else hidden, batches)[last]
        self._logits[slots] = self._module.logits(out)
        self._hidden[slots] = self._recycled(out)

    def _run(self, tokens: torch.Tensor, hidden: torch.Tensor, batches: Sequence[Batch]) -> torch.Tensor:
        """The module over one half or two."""
        sizes = [len(batch.positions) for batch in batches]
        inputs = zip(tokens.split_with_sizes(sizes), hidden.split_with_sizes(sizes), batches, strict=True)
        return torch.cat(run([self._module(*each, self._cache) for each in inputs]))

    def _recycled(self, out: torch.Tensor) -> torch.Tensor:
        return self._module.norm(out) if self._recycle_post_norm else out

    def _extend(
        self,
        rows: DraftRows,
        drafts: torch.Tensor,
        hidden: torch.Tensor,
        step: int,
        halves: int,
        capacities: NDArray[np.int64],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One more token a row: the module at position start + step, on the draft for start + step + 1."""
        batches = pack(
            np.ones_like(rows.counts),
            rows.bounds,
            rows.starts + step,
            rows.page_table,
            page_size=self._cache.page_size,
            dtype=self._hidden.dtype,
            halves=halves,
            capacities=capacities,
        )
        out = self._run(drafts, hidden, batches)
        return self._module.logits(out), self._recycled(out)
