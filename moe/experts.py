"""The routed experts of one layer that this rank owns."""

from collections.abc import Iterable

import torch

from raysonar.kernels.elementwise import swiglu
from raysonar.kernels.linear import Linear


class Experts:
    """Gated feed-forward networks, each on the tokens that were routed to it."""

    def __init__(self, gate_up: Iterable[torch.Tensor], down: Iterable[torch.Tensor]) -> None:
        """One entry an expert: gate_up [2 * intermediate, hidden], down [hidden, intermediate]; taken over."""
        self._gate_up = [Linear(weight) for weight in gate_up]
        self._down = [Linear(weight) for weight in down]

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """sum_k weights[:, k] * expert_k(x), over this rank's experts.

        x: [tokens, hidden]; experts: int64 [tokens, top_k], -1 for an expert of another rank; weights: [tokens, top_k].
        Returns [tokens, hidden]. Each token's sum runs over its k in order, so that it does not depend on the other
        tokens.
        """
        tokens, top_k = experts.shape
        flat = experts.view(-1)
        order = flat.argsort(stable=True)
        foreign, *counts = torch.bincount(flat + 1, minlength=len(self._down) + 1).tolist()
        routed = x[order // top_k] if not foreign else x[order[foreign:] // top_k]
        outputs, start = [], 0
        for expert, count in enumerate(counts):
            if count:
                hidden = swiglu(self._gate_up[expert](routed[start : start + count]))
                outputs.append(self._down[expert](hidden))
                start += count
        if not outputs:
            return torch.zeros_like(x)
        if foreign:
            outputs.insert(0, x.new_zeros((foreign, x.shape[1])))
        unsorted = x.new_empty((tokens * top_k, x.shape[1]))
        unsorted[order] = torch.cat(outputs)
        return torch.bmm(weights.to(x.dtype)[:, None], unsorted.view(tokens, top_k, -1)).squeeze(1)
