"""The dense feed-forward network."""

import torch

from raysonar.kernels.elementwise import swiglu
from raysonar.model.weights import Weights


class Mlp:
    """A gated feed-forward network (SwiGLU)."""

    def __init__(self, hidden: int, intermediate: int, weights: Weights, prefix: str) -> None:
        self._gate_up = weights.linear(
            (f"{prefix}.gate_proj.weight", intermediate), (f"{prefix}.up_proj.weight", intermediate), in_features=hidden
        )
        self._down = weights.linear((f"{prefix}.down_proj.weight", hidden), in_features=intermediate)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        return self._down(swiglu(self._gate_up(x)))
