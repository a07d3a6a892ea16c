"""The dense feed-forward network."""

import torch

from raysonar.kernels.elementwise import swiglu
from raysonar.model.weights import Weights


class Mlp:
    """A gated feed-forward network (SwiGLU), or the part of one that has `inner` of its intermediate channels."""

    def __init__(self, hidden: int, intermediate: int, weights: Weights, prefix: str, inner: slice) -> None:
        gate_up = ((f"{prefix}.gate_proj.weight", intermediate), (f"{prefix}.up_proj.weight", intermediate))
        self._gate_up = weights.linear(*gate_up, in_features=hidden, rows=(inner, inner))
        self._down = weights.linear_columns(f"{prefix}.down_proj.weight", hidden, intermediate, inner)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]; parts of a network are to be summed."""
        return self._down(swiglu(self._gate_up(x)))


class ShardedMlp:
    """A feed-forward network tensor-parallel over a data-parallel row."""

    def __init__(self, hidden: int, intermediate: int, weights: Weights, prefix: str) -> None:
        self._part = Mlp(hidden, intermediate, weights, prefix, weights.place.share(intermediate))
        self._communicators = weights.communicators

    def __call__(self, x: torch.Tensor, half: int) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self._communicators[half].sum_over_row(self._part(x))
