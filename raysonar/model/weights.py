"""Weights on their way from a checkpoint to the device: names and shapes in, tensors and linear maps out."""

from collections.abc import Sequence
from typing import Protocol

import torch

from raysonar.kernels.linear import Linear


class TensorReader(Protocol):
    """Reads named tensors of known shape (`raysonar.model.checkpoint.CheckpointReader`)."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of this name."""

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor, possibly a view of the file; ModelFolderError when missing or misshapen."""


class Weights:
    """Gives modules their own copies of checkpoint tensors, in one dtype on one device."""

    def __init__(self, reader: TensorReader, *, dtype: torch.dtype, device: torch.device) -> None:
        self.reader = reader
        self.dtype = dtype
        self.device = device

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy in `dtype` (the common one unless given)."""
        return self.reader.read(name, shape).to(device=self.device, dtype=dtype or self.dtype, copy=True)

    def stacked(self, parts: Sequence[tuple[str, int]], in_features: int) -> torch.Tensor:
        """[sum of rows, in_features]: the matrices (name, rows) below each other."""
        out = torch.empty((sum(rows for _, rows in parts), in_features), dtype=self.dtype, device=self.device)
        start = 0
        for name, rows in parts:
            out[start : start + rows].copy_(self.reader.read(name, (rows, in_features)))
            start += rows
        return out

    def linear(self, *parts: tuple[str, int], in_features: int) -> Linear:
        """One linear map of the matrices (name, out_features) below each other."""
        return Linear(self.stacked(parts, in_features))
