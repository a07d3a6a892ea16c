"""Running a loaded model over its paged cache by hand: rows in any chunks, pages in a shuffled order."""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from raysonar.model.batch import Batch, pack, packing_order
from raysonar.model.cache import KvCache
from raysonar.model.loading import LoadedModel
from raysonar.moe.executor import run


class PagedRun:
    """Rows of tokens on their way through a model.

    run = PagedRun(loaded, rows=2, length=40)
    hidden = run.step({0: [5, 6, 7], 1: [8]})   # row -> its next tokens; gives row -> [tokens, hidden], before the norm
    """

    def __init__(self, loaded: LoadedModel, *, rows: int, length: int, page_size: int = 4, seed: int = 0) -> None:
        self.loaded = loaded
        pages = -(-length // page_size)
        target = loaded.target
        self._dtype = target.dtype
        self._cache = KvCache(
            loaded.cache_shapes,
            pages=rows * pages,
            page_size=page_size,
            dtype=self._dtype,
            device=target.rotation.device,
        )
        shuffled = torch.randperm(rows * pages, generator=torch.Generator().manual_seed(seed))
        self._table = shuffled.view(rows, pages)
        self._lengths = np.zeros(rows, np.int64)
        self._drafted = np.zeros(rows, np.int64)

    def step(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """The target over the rows' next tokens."""
        order, batch, packed = self._packed(tokens, self._lengths)
        with torch.inference_mode():
            [hidden] = run([self.loaded.target(packed, batch, self._cache)])
        return self._by_row(order, tokens, hidden)

    def draft(self, tokens: Mapping[int, Sequence[int]], hidden: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """The MTP module over the rows' next positions: tokens shifted left by one, and the positions' states."""
        assert self.loaded.mtp is not None
        order, batch, packed = self._packed(tokens, self._drafted)
        with torch.inference_mode():
            states = torch.cat([hidden[row] for row in order])
            [out] = run([self.loaded.mtp(packed, states, batch, self._cache)])
        return self._by_row(order, tokens, out)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return self.loaded.target.logits(hidden)

    def _packed(
        self, tokens: Mapping[int, Sequence[int]], lengths: np.ndarray
    ) -> tuple[list[int], Batch, torch.Tensor]:
        rows = np.array(list(tokens))
        counts = np.array([len(tokens[row]) for row in rows], np.int32)
        bounds = (lengths[rows] + counts).astype(np.int32)
        at = packing_order(counts, bounds, self._cache.page_size)
        order = rows[at]
        [batch] = pack(
            counts[at],
            bounds[at],
            torch.from_numpy(lengths[order]),
            self._table[torch.from_numpy(order)],
            page_size=self._cache.page_size,
            dtype=self._dtype,
        )
        lengths[rows] += counts
        return order.tolist(), batch, torch.tensor([token for row in order.tolist() for token in tokens[row]])

    @staticmethod
    def _by_row(order: list[int], tokens: Mapping[int, Sequence[int]], values: torch.Tensor) -> dict[int, torch.Tensor]:
        return dict(zip(order, values.split([len(tokens[row]) for row in order]), strict=True))


def run_in_chunks(loaded: LoadedModel, sequences: torch.Tensor, chunks: Sequence[int]) -> torch.Tensor:
    """Hidden states before the norm, [R, S, hidden], of sequences [R, S] that are fed in chunks of these sizes."""
    rows, length = sequences.shape
    assert sum(chunks) == length
    run = PagedRun(loaded, rows=rows, length=length)
    parts, start = [], 0
    for size in chunks:
        part = sequences[:, start : start + size].tolist()
        hidden = run.step(dict(enumerate(part)))
        parts.append(torch.stack([hidden[row] for row in range(rows)]))
        start += size
    return torch.cat(parts, 1)
