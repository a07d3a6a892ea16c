"""Log-probabilities of answers and prompts, for the rows that ask; the model's own, of its raw logits."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from raysonar.model.transformer import Transformer
from raysonar.ranks.layout import Layout
from raysonar.ranks.slots import SlotTable

Arrays = dict[str, NDArray[Any]]
"""Fields of a StepResult."""


def answer_logprobs(layout: Layout, slots: SlotTable, logits: torch.Tensor, tokens: torch.Tensor) -> Arrays:
    """logits: fp32 [N, V], the step's logit rows; tokens: int64 [S, W], each sampling row's new tokens."""
    wanted = slots.records["logprobs"][layout.slots[layout.sampling]]
    asking = np.flatnonzero(wanted >= 0)
    if not len(asking):
        return {}
    counts = 1 + layout.drafts[layout.sampling]
    width, most = layout.width, int(wanted.max())
    column = np.minimum(np.arange(width), counts[asking, None] - 1)
    place = torch.from_numpy((np.cumsum(counts) - counts)[asking, None] + column).to(logits.device)
    table = logits[place.flatten()].log_softmax(-1).view(len(asking), width, -1)
    chosen = tokens[torch.from_numpy(asking).to(tokens.device)]
    top = table.topk(most, -1)
    rows = layout.order[layout.sampling[asking]]
    return {
        "logprob": _spread(rows, len(layout.order), table.gather(-1, chosen[..., None]).squeeze(-1)),
        "top_token": _spread(rows, len(layout.order), top.indices.to(torch.int32)),
        "top_logprob": _spread(rows, len(layout.order), top.values),
    }


def prompt_logprobs(
    layout: Layout,
    slots: SlotTable,
    target: Transformer,
    hidden: torch.Tensor,
    *,
    inputs: tuple[torch.Tensor, torch.Tensor],
) -> Arrays:
    """hidden: [T, hidden]; inputs: the slot and the position of each token of the packed batch, int64 [T] each."""
    records = slots.records[layout.slots]
    # a prefill row's bound is exact, so where it starts is known here
    starts = layout.bounds - layout.tokens
    counts = np.minimum(layout.tokens, records["prompt_tokens"] - 1 - starts).clip(min=0)
    counts[(records["prompt_logprobs"] < 0) | (layout.drafts > 0)] = 0
    if not counts.any():
        return {}
    by_plan = np.argsort(layout.order)
    first = (layout.ends - layout.tokens)[by_plan]
    per_row = counts[by_plan]
    offset = np.arange(per_row.sum()) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    place = torch.from_numpy(np.repeat(first, per_row) + offset).to(hidden.device)
    table = target.logits(hidden[place]).log_softmax(-1)
    token_slots, positions = inputs
    following = slots.tokens[token_slots[place], positions[place] + 1].long()
    top = table.topk(int(records["prompt_logprobs"][counts > 0].max()), -1)
    return {
        "prompt_count": per_row.astype(np.int32),
        "prompt_logprob": table.gather(-1, following[:, None]).squeeze(-1).cpu().numpy(),
        "prompt_top_token": top.indices.to(torch.int32).cpu().numpy(),
        "prompt_top_logprob": top.values.cpu().numpy(),
    }


def _spread(rows: NDArray[np.intp], count: int, values: torch.Tensor) -> NDArray[Any]:
    """`values` [len(rows), ...] at `rows` of `count`, zeros elsewhere."""
    host = values.cpu().numpy()
    out = np.zeros((count, *host.shape[1:]), host.dtype)
    out[rows] = host
    return out
