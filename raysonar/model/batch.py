"""The tokens of several rows, packed for one forward pass."""

import itertools
from collections.abc import Iterable
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
    capacities: tuple[int, ...]
    """The most tokens that each data-parallel row has in a half, the same on all ranks; empty where not known."""


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
    capacities: Iterable[int] = (),
) -> list[Batch]:
    """Rows that are in packing order, as one batch or as two of similar token counts; no row is cut.

    starts: int64 [R], each row's computed length; page_table: int64 [R, pages]. No value is read back from the device.
    """
    cut = _cut(row_tokens) if halves == 2 else len(row_tokens)
    edges, room = [0, cut, len(row_tokens)][: halves + 1], tuple(map(int, capacities))
    parts = [slice(*edge) for edge in itertools.pairwise(edges)]
    return [
        Batch(*_pack_rows(row_tokens[at], row_bound[at], starts[at], page_table[at], page_size, dtype), half, room)
        for half, at in enumerate(parts)
    ]


def half_tokens(row_tokens: NDArray[np.int32], halves: int) -> int:
    """The tokens of the fuller half that `pack` makes of these rows. They need not be in packing order, which goes by
    the rows' tokens before all else."""
    total = int(row_tokens.sum())
    if halves == 1:
        return total
    ordered = np.sort(row_tokens)
    first = int(ordered[: _cut(ordered)].sum())
    return max(first, total - first)


def _cut(row_tokens: NDArray[np.int32]) -> int:
    """How many rows the first half has: the cut is the nearest to the middle of the tokens."""
    ends = np.cumsum(row_tokens)
    return int(np.abs(ends - ends[-1] / 2).argmin()) + 1 if len(ends) > 1 else len(ends)


def _pack_rows(
    row_tokens: NDArray[np.int32],
    row_bound: NDArray[np.int32],
    starts: torch.Tensor,
    page_table: torch.Tensor,
    page_size: int,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, AttentionPlan]:
    """Positions, cache entries and how to attend."""
    if not len(row_tokens):
        nothing = starts.new_empty(0)
        return nothing, nothing, AttentionPlan(())
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
    return _join(positions), _join(entries), AttentionPlan(tuple(groups))


def _join(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _size_class(row_bound: NDArray[np.int32], page_size: int) -> NDArray[np.int32]:
    """log2 of the pages a row covers, rounded up."""
    pages = np.maximum(-(-row_bound // page_size), 1)
    return np.ceil(np.log2(pages)).astype(np.int32)
