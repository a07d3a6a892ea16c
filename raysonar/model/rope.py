"""Rotary position embedding: the table of phasors for every position."""

import math

import torch

from raysonar.model.spec import RopeSpec


def rotation_table(spec: RopeSpec, positions: int, device: torch.device) -> torch.Tensor:
    """complex64 [positions, 1, dim / 2]: exp(i * position * frequency), times YaRN's attention factor."""
    frequencies = _frequencies(spec)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), frequencies)
    magnitude = torch.full_like(angles, _magnitude(spec))
    return torch.polar(magnitude, angles)[:, None].to(device)


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature (2309.00071, section 3.4), as DeepSeek generalises it."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def interleave_order(dim: int) -> torch.Tensor:
    """The channel order that turns RoPE pairs (i, i + dim/2) into pairs (2i, 2i + 1)."""
    return torch.arange(dim).view(2, dim // 2).T.flatten()


def _magnitude(spec: RopeSpec) -> float:
    if spec.kind != "yarn":
        return 1.0
    if spec.attention_factor is not None:
        return spec.attention_factor
    if spec.mscale and spec.mscale_all_dim:
        return yarn_mscale(spec.factor, spec.mscale) / yarn_mscale(spec.factor, spec.mscale_all_dim)
    return yarn_mscale(spec.factor, 1.0)


def _frequencies(spec: RopeSpec) -> torch.Tensor:
    """fp32 [dim / 2]."""
    base = 1.0 / spec.theta ** (torch.arange(0, spec.dim, 2, dtype=torch.float32) / spec.dim)
    match spec.kind:
        case "default":
            return base
        case "linear":
            return base / spec.factor
        case "yarn":
            return _yarn(spec, base)
        case "llama3":
            return _llama3(spec, base)


def _yarn(spec: RopeSpec, base: torch.Tensor) -> torch.Tensor:
    """NTK by parts (2309.00071, section 3.2): fast channels keep their frequency, slow ones are interpolated."""

    def channel(rotations: float) -> float:
        turns = spec.original_max_positions / (rotations * 2 * math.pi)
        return spec.dim * math.log(turns) / (2 * math.log(spec.theta))

    low = max(math.floor(channel(spec.beta_fast)), 0)
    high = min(math.ceil(channel(spec.beta_slow)), spec.dim - 1)
    span = (high - low) or 0.001
    ramp = ((torch.arange(spec.dim // 2, dtype=torch.float32) - low) / span).clamp(0, 1)
    return base / spec.factor * ramp + base * (1 - ramp)


def _llama3(spec: RopeSpec, base: torch.Tensor) -> torch.Tensor:
    """Llama 3.1: wavelengths beyond the original context are interpolated, short ones kept, a ramp in between."""
    turns = spec.original_max_positions * base / (2 * math.pi)
    smooth = ((turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)).clamp(0, 1)
    return base * (smooth + (1 - smooth) / spec.factor)
