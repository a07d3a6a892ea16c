"""Attention of packed rows of queries over a paged cache, in which keys and values are slices of one entry per token.

Multi-head latent attention is the case of one key-value head whose value is the first part of its key.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionGroup:
    """Rows with the same number of queries and cached lengths of similar size, next to each other in the batch."""

    first: int
    """The group's first token in the packed batch."""
    rows: int
    queries: int
    """Of each row."""
    pages: torch.Tensor
    """int64 [rows, pages]: the rows' page tables, cut to the group's longest row."""
    hidden: torch.Tensor
    """[rows, queries, keys], 0 or -inf, to be added to the scores: a query at position p sees keys 0 .. p."""


@dataclass(frozen=True)
class AttentionPlan:
    """All groups of a batch; they cover its tokens in order."""

    groups: tuple[AttentionGroup, ...]


def plan_group(
    *, first: int, positions: torch.Tensor, pages: torch.Tensor, page_size: int, keys: int, dtype: torch.dtype
) -> AttentionGroup:
    """positions: int64 [rows, queries]; pages: int64 [rows, n]; keys: upper bound of every row's position + 1."""
    rows, queries = positions.shape
    pages = pages[:, : -(-keys // page_size)]
    key = torch.arange(pages.shape[1] * page_size, device=positions.device)
    hidden = torch.zeros((rows, queries, key.shape[0]), dtype=dtype, device=positions.device)
    hidden.masked_fill_(key > positions[..., None], float("-inf"))
    return AttentionGroup(first=first, rows=rows, queries=queries, pages=pages, hidden=hidden)


def paged_attention(
    q: torch.Tensor, cache: torch.Tensor, plan: AttentionPlan, *, scale: float, keys: slice, values: slice
) -> torch.Tensor:
    """softmax(scale * q k^T) v, causal, each query over the cached entries of its own row.

    q: [tokens, kv_heads, heads per kv head, key width]; cache: [pages, page_size, kv_heads, entry width]; `keys` and
    `values` cut the entry. Returns [tokens, kv_heads, heads per kv head, value width].
    """
    outputs = [_attend_group(q, cache, group, scale, keys, values) for group in plan.groups]
    if not outputs:
        return q.new_empty((*q.shape[:3], len(range(*values.indices(cache.shape[-1])))))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_group(
    q: torch.Tensor, cache: torch.Tensor, group: AttentionGroup, scale: float, keys: slice, values: slice
) -> torch.Tensor:
    _, kv_heads, repeat, width = q.shape
    rows, queries = group.rows, group.queries
    # One contiguous matrix of entries per (row, kv head). Indexing with the matrix of pages takes seven times as long.
    entries = cache.flatten(1).index_select(0, group.pages.flatten()).view(rows, -1, *cache.shape[2:])
    entries = entries.squeeze(2) if kv_heads == 1 else entries.transpose(1, 2).flatten(0, 1)
    q = q[group.first : group.first + rows * queries].view(rows, queries, kv_heads, repeat, width)
    q = q.transpose(1, 2).reshape(rows * kv_heads, queries * repeat, width)
    hidden = group.hidden[:, None, :, None].expand(rows, kv_heads, queries, repeat, -1).reshape(*q.shape[:2], -1)
    scores = torch.baddbmm(hidden, q, entries[..., keys].mT, alpha=scale)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(q.dtype)
    out = torch.bmm(weights, entries[..., values]).view(rows, kv_heads, queries, repeat, -1)
    return out.transpose(1, 2).reshape(rows * queries, kv_heads, repeat, -1)
