"""The tokens of several rows, packed for one forward pass."""

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from raysonar.kernels.attention import AttentionPlan, plan_group


@dataclass(frozen=True)
class Batch:
    """What a forward pass needs to know of its tokens besides their ids: T tokens of R rows, in packed order."""

    positions: torch.Tensor
    """int64 [T]."""
    entries: torch.Tensor
    """int64 [T]: the cache entry (page * page_size + offset) that each token's keys and values are written to."""
    attention: AttentionPlan
    half: int
    """Which half of the step it is: each has communicators of its own."""


def packing_order(row_tokens: NDArray[np.int32], row_bound: NDArray[np.int32], page_size: int) -> NDArray[np.intp]:
    """The order that puts rows of equal token count and similar cached length (within a factor of two) side by side.

    row_tokens, row_bound: [R]; the bound is of the tokens computed when the pass ends. Returns a permutation of R.
    """
    return np.lexsort((row_bound, _size_class(row_bound, page_size), row_tokens))


def pack(
    row_tokens: NDArray[np.int32],
    row_bound: NDArray[np.int32],
    starts: torch.Tensor,
    page_table: torch.Tensor,
    *,
    page_size: int,
    dtype: torch.dtype,
    halves: int = 1,
) -> list[Batch]:
    """Rows that are in packing order, as one batch or as two of similar token counts; no row is cut.

    starts: int64 [R], each row's computed length; page_table: int64 [R, pages]. No value is read back from the device.
    """
    cut = len(row_tokens)
    if halves == 2:
        ends = np.cumsum(row_tokens)
        cut = int(np.abs(ends - row_tokens.sum() / 2).argmin()) + 1 if len(row_tokens) > 1 else len(row_tokens)
    edges = [0, cut, len(row_tokens)][: halves + 1]
    return [
        _pack_half(
            row_tokens[low:high], row_bound[low:high], starts[low:high], page_table[low:high], page_size, dtype, half
        )
        for half, (low, high) in enumerate(itertools.pairwise(edges))
    ]


def _pack_half(
    row_tokens: NDArray[np.int32],
    row_bound: NDArray[np.int32],
    starts: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    dtype: torch.dtype,
    half: int,
) -> Batch:
    if not len(row_tokens):
        nothing = starts.new_empty(0)
        return Batch(nothing, nothing, AttentionPlan(()), half)
    classes = _size_class(row_bound, page_size)
    changes = np.flatnonzero((np.diff(row_tokens) != 0) | (np.diff(classes) != 0)) + 1
    edges = [0, *changes.tolist(), len(row_tokens)]
    groups, positions, entries, first = [], [], [], 0
    for low, high in itertools.pairwise(edges):
        queries, keys = int(row_tokens[low]), int(row_bound[low:high].max())
        at = starts[low:high, None] + torch.arange(queries, device=starts.device)
        pages = page_table[low:high]
        groups.append(plan_group(first=first, positions=at, pages=pages, page_size=page_size, keys=keys, dtype=dtype))
        positions.append(at.flatten())
        entries.append((pages.gather(1, at // page_size) * page_size + at % page_size).flatten())
        first += (high - low) * queries
    return Batch(_join(positions), _join(entries), AttentionPlan(tuple(groups)), half)


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _size_class(row_bound: NDArray[np.int32], page_size: int) -> NDArray[np.int32]:
    """log2 of the pages a row covers, rounded up."""
    pages = np.maximum(-(-row_bound // page_size), 1)
    return np.ceil(np.log2(pages)).astype(np.int32)
