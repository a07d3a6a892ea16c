"""How a token travels to the ranks of its experts: as one row of bytes, so that one message carries all of it."""

from dataclasses import dataclass

import torch

from raysonar.kernels.fp8 import BLOCK, dequantize_rows, quantize_rows


@dataclass(frozen=True)
class Routed:
    """Tokens at a rank that owns some of their experts: M tokens from all ranks, sorted by rank."""

    hidden: torch.Tensor
    """[M, hidden]."""
    experts: torch.Tensor
    """int64 [M, top_k]: among this rank's own experts, from 0; -1 for other ranks' experts."""
    weights: torch.Tensor
    """fp32 [M, top_k]."""


@dataclass(frozen=True, kw_only=True)
class RowFormat:
    """A row: expert ids from 1 as int32, weights as fp32, the hidden state as it is or as e4m3 behind its fp32 scales.

    A row of zeros is no token: it has no expert.
    """

    hidden: int
    top_k: int
    dtype: torch.dtype
    float8: bool

    @property
    def row_bytes(self) -> int:
        """A multiple of 4, so that every part of every row is aligned."""
        head, scales, states = self._sizes
        return 2 * head + scales + -(-states // 4) * 4

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Bytes of the ids (and of the weights), of the scales, and of the hidden state."""
        scales = 4 * -(-self.hidden // BLOCK) if self.float8 else 0
        return 4 * self.top_k, scales, self.hidden * (1 if self.float8 else self.dtype.itemsize)

    def pack(self, hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, *, rows: int) -> torch.Tensor:
        """N tokens, and rows without a token behind them: uint8 [rows, row_bytes].

        hidden: [N, hidden]; experts: int64 [N, top_k], of all experts; weights: fp32 [N, top_k].
        """
        buffer = torch.empty((rows, self.row_bytes), dtype=torch.uint8, device=hidden.device)
        tokens = len(hidden)
        if rows > tokens:
            buffer[tokens:].zero_()
        ids, scaled, scales, states = self._parts(buffer[:tokens])
        ids.copy_(experts + 1)
        scaled.copy_(weights)
        if self.float8:
            hidden, factors = quantize_rows(hidden)
            scales.copy_(factors)
        states.copy_(hidden)
        return buffer

    def unpack(self, buffer: torch.Tensor, own: slice) -> Routed:
        """uint8 [M, row_bytes] -> M tokens at the rank that owns the experts `own`; views where they can be."""
        ids, weights, scales, states = self._parts(buffer)
        local = ids.long() - (1 + own.start)
        local = local.masked_fill((local < 0) | (local >= own.stop - own.start), -1)
        return Routed(dequantize_rows(states, scales, self.dtype) if self.float8 else states, local, weights)

    def _parts(self, buffer: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Typed views of the ids, weights, scales and hidden states."""
        head, scales, states = self._sizes
        first = 2 * head + scales
        return (
            buffer[:, :head].view(torch.int32),
            buffer[:, head : 2 * head].view(torch.float32),
            buffer[:, 2 * head : first].view(torch.float32),
            buffer[:, first : first + states].view(torch.float8_e4m3fn if self.float8 else self.dtype),
        )
