"""Drafting with a multi-token-prediction module, in lock-step with the target.

The module's entry for position i stands in the target's page at the same place and is made of the target's hidden
state of i and the embedding of token i + 1. After each verification it runs once over the whole verified batch,
shifted left by one token: that fills its entries with the target's own hidden states, and its output at the last
accepted position is carried over as the first draft's logits. Further drafts of a step feed on the module's own hidden
states; the entries that they write are overwritten when their tokens are verified.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from raysonar.model.batch import Batch, pack
from raysonar.model.cache import KvCache
from raysonar.model.mtp import MtpModule
from raysonar.model.transformer import Transformer
from raysonar.moe.executor import run
from raysonar.speculation.draft import DraftRows, Proposal, Verified
from raysonar.speculation.sampler import SamplingTable


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
        """As `Draft.propose`. Every rank runs the module rounds - 1 times, with rows or without."""
        proposal = Proposal(rows, tokens, rounds, self._sampling)
        logits, hidden = self._logits[rows.slots], self._hidden[rows.slots]
        for step in range(rounds):
            if step:
                if (left := proposal.narrow()) is not None:
                    hidden = hidden[left]
                logits, hidden = self._extend(
                    proposal.rows, proposal.latest, hidden, step - 1, halves, capacities[step]
                )
            proposal.add(logits)
        return proposal.drafts, proposal.scores

    def refill(self, verified: Verified, tokens: torch.Tensor) -> None:
        """Run over the verified batch, shifted left, and carry what follows each row's last accepted position."""
        shifted = tokens[verified.token_slots, verified.positions + 1].long()
        hidden = self._target.norm(verified.hidden) if self._post_norm else verified.hidden
        out = self._run(shifted, hidden, verified.batches)[verified.last]
        self._logits[verified.slots] = self._module.logits(out)
        self._hidden[verified.slots] = self._recycled(out)

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
