"""The routed experts of one layer that this rank owns."""

import torch

from raysonar.kernels.elementwise import swiglu
from raysonar.kernels.linear import Linear


class Experts:
    """Gated feed-forward networks in the rank's slots, each on the tokens that were routed to it."""

    def __init__(self, slots: int) -> None:
        self._slots: list[tuple[Linear, Linear] | None] = [None] * slots

    def put(self, slot: int, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """An expert into a slot: gate_up [2 * intermediate, hidden], down [hidden, intermediate]; taken over."""
        self._slots[slot] = None  # let go of the one before first
        self._slots[slot] = Linear(gate_up), Linear(down)

    def __call__(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """sum_k weights[:, k] * expert_k(x), over this rank's experts.

        x: [tokens, hidden]; experts: int64 [tokens, top_k], slots, -1 for another rank's; weights: [tokens, top_k].
        Returns [tokens, hidden]. Each token's sum runs over its k in order, so that it does not depend on the other
        tokens.
        """
        tokens, top_k = experts.shape
        flat = experts.view(-1)
        order = flat.argsort(stable=True)
        foreign, *counts = torch.bincount(flat + 1, minlength=len(self._slots) + 1).tolist()
        routed = x[order // top_k] if not foreign else x[order[foreign:] // top_k]
        busy = [(expert, count) for expert, count in zip(self._slots, counts, strict=True) if count and expert]
        if not busy:
            return torch.zeros_like(x)
        sizes = [count for _, count in busy]
        # one activation for all: many small operators cost more than two that join and split
        parts = zip(busy, routed.split_with_sizes(sizes), strict=True)
        hidden = swiglu(torch.cat([expert[0](part) for (expert, _), part in parts]))
        parts = zip(busy, hidden.split_with_sizes(sizes), strict=True)
        outputs = [expert[1](part) for (expert, _), part in parts]
        if foreign:
            outputs.insert(0, x.new_zeros((foreign, x.shape[1])))
        unsorted = x.new_empty((tokens * top_k, x.shape[1]))
        unsorted[order] = torch.cat(outputs)
        return torch.bmm(weights.to(x.dtype)[:, None], unsorted.view(tokens, top_k, -1)).squeeze(1)
