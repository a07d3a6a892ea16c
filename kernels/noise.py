"""Counter-based random numbers: a value is a pure function of (seed, position, stream, column).

Nothing is stored between draws, so every rank, device and repetition of a step sees the same noise. The generator is
SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; the finaliser is
Stafford's variant 13), used as a hash. The seed is mixed to a key, once a request; key and (position, stream) are
mixed to a state; column v's bits are mix(state + (v + 1) * GOLDEN), the v-th output of a generator that starts there.

Resolution: 63 bits become a float32 by rounding, which keeps 24 significant bits at every magnitude, so that uniforms
near 0 are as fine as the format allows (down to 2^-64) where the usual 24-bit grid has steps of 2^-24. The smallest of
129,280 exponentials is about 8e-6, only some hundred such steps: ties and a bias in the winner. Gumbel noise is
therefore taken from the fine end, -log(-log1p(-u)): its maximum belongs to the smallest u. Float64 is not needed.
"""

from enum import IntEnum
from functools import lru_cache

import torch
from torch import Tensor


class Stream(IntEnum):
    """Independent noise for each purpose."""

    TARGET = 0
    """The target's own draws; and, under shared-noise coupling, the draft's."""
    DRAFT = 1
    """The draft's draws under the rejection rule."""
    ACCEPT = 2
    """The uniform that a draft's acceptance is decided with."""


def _signed(bits: int) -> int:
    """The int64 with the same bits as this uint64."""
    return bits - (1 << 64) if bits >> 63 else bits


_GOLDEN = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)
_STREAMS = 4
_LARGEST = 1 - 2.0**-24
_SMALLEST = 2.0**-64


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place: int64 arithmetic wraps; the masks make its shifts logical."""
    z ^= (z >> 30).bitwise_and_((1 << 34) - 1)
    z *= _FIRST
    z ^= (z >> 27).bitwise_and_((1 << 37) - 1)
    z *= _SECOND
    z ^= (z >> 31).bitwise_and_((1 << 33) - 1)
    return z


@lru_cache(maxsize=16)
def _columns(columns: int, device: torch.device) -> Tensor:
    return torch.arange(1, columns + 1, device=device) * _GOLDEN


def keys(seed: Tensor) -> Tensor:
    """int64 keys, of the same shape, for any int64 seeds: neighbouring seeds' keys have nothing in common."""
    return _mix(seed + _GOLDEN)


def uniform(key: Tensor, position: Tensor, stream: int | Tensor, columns: int) -> Tensor:
    """Uniform noise in the open interval (0, 1), bit for bit the same on every device.

    Args:
        key: int64 [N], from `keys`.
        position: int64 [N], at least 0: the index of the token that is being chosen.
        stream: one `Stream` for all rows, or int64 [N].
        columns: values a row.

    Returns:
        float32 [N, columns], from 2^-64 to 1 - 2^-24.
    """
    state = _mix((position * _STREAMS + stream) * _GOLDEN + key)
    bits = _mix(state[:, None] + _columns(columns, key.device)).bitwise_and_((1 << 63) - 1)
    return bits.to(torch.float32).mul_(2.0**-63).clamp_(_SMALLEST, _LARGEST)


def gumbel(key: Tensor, position: Tensor, stream: int | Tensor, columns: int) -> Tensor:
    """Standard Gumbel noise: argmax(scores + noise) is a draw from softmax(scores).

    Args and shape as `uniform`'s. Values from -2.82 to 44.4, always finite: a token of score -inf is never drawn, and
    the only one of finite score always is. Devices may differ in the logarithm's last bit.
    """
    return uniform(key, position, stream, columns).neg_().log1p_().neg_().log_().neg_()
