"""Normalisation, activation and rotary embedding."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Root-mean-square normalisation over the last dimension (1910.07467, eq. 4), computed in fp32."""
    return F.rms_norm(x, weight.shape, weight, eps)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2 * n] -> [..., n]: silu(first half) * second half (2002.05202, eq. 6)."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding (2104.09864, eq. 34) of channel pairs (2i, 2i + 1).

    x: [tokens, heads, channels]; rotation: complex64 [tokens, 1, channels / 2], the unit (or YaRN-scaled) phasors.
    """
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], x.shape[-1] // 2, 2))
    return torch.view_as_real(pairs * rotation).flatten(-2).to(x.dtype)
