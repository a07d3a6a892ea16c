"""Weights on their way from a checkpoint to the device: names and shapes in, tensors and linear maps out."""

from collections.abc import Sequence
from typing import Protocol

import torch

from raysonar.kernels.linear import Linear
from raysonar.moe.communicator import Communicator

Slices = tuple[slice, ...]
WHOLE = slice(None)


class TensorReader(Protocol):
    """Reads named tensors of known shape (`raysonar.model.checkpoint.CheckpointReader`)."""

    def has(self, name: str) -> bool:
        """Whether the checkpoint holds a tensor of this name."""

    def read(self, name: str, shape: tuple[int, ...], select: Slices | None = None) -> torch.Tensor:
        """The tensor or a part of it, possibly a view of the file; ModelFolderError when missing or misshapen."""

    def skip(self, name: str) -> None:
        """Leave a tensor to another rank."""


class Weights:
    """Gives modules their own copies of checkpoint tensors, or of this rank's part, in one dtype on one device."""

    def __init__(
        self,
        reader: TensorReader,
        *,
        dtype: torch.dtype,
        device: torch.device,
        communicators: Sequence[Communicator],
        redundant_experts: int | None = None,
    ) -> None:
        """communicators: the rank's, one for each half of a step; modules keep them. redundant_experts: a layer's
        expert slots beyond one an expert, when experts can move; None when they stay where they are."""
        self.reader = reader
        self.dtype = dtype
        self.device = device
        self.communicators = communicators
        self.place = communicators[0].place
        self.redundant_experts = redundant_experts

    def tensor(
        self, name: str, *shape: int, dtype: torch.dtype | None = None, select: Slices | None = None
    ) -> torch.Tensor:
        """A copy in `dtype` (the common one unless given). `shape` is the whole tensor's; `select` takes a part."""
        read = self.reader.read(name, shape, select)
        return read.to(device=self.device, dtype=dtype or self.dtype, copy=True)

    def stacked(
        self, parts: Sequence[tuple[str, int]], in_features: int, *, rows: Slices | None = None
    ) -> torch.Tensor:
        """[sum of rows, in_features]: the matrices (name, rows), or the `rows` of each, below each other."""
        chosen = rows or (WHOLE,) * len(parts)
        sizes = [len(range(*part.indices(count))) for part, (_, count) in zip(chosen, parts, strict=True)]
        out = torch.empty((sum(sizes), in_features), dtype=self.dtype, device=self.device)
        places = out.split_with_sizes(sizes)
        for (name, count), part, place in zip(parts, chosen, places, strict=True):
            place.copy_(self.reader.read(name, (count, in_features), (part,)))
        return out

    def linear(self, *parts: tuple[str, int], in_features: int, rows: Slices | None = None) -> Linear:
        """One linear map of the matrices (name, out_features), or the `rows` of each, below each other."""
        return Linear(self.stacked(parts, in_features, rows=rows))

    def linear_columns(self, name: str, out_features: int, in_features: int, columns: slice) -> Linear:
        """The linear map of some of a matrix's inputs."""
        return Linear(self.tensor(name, out_features, in_features, select=(WHOLE, columns)))
