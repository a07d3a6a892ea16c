"""fp8 with a scale for each block: weights, and hidden states on their way to other ranks."""

import torch
import torch.nn.functional as F

BLOCK = 128
"""Values of a hidden state that share a scale (2412.19437, section 3.3)."""
_LARGEST = torch.finfo(torch.float8_e4m3fn).max
_LEAST = 2.0**-100
"""Magnitudes below count as this: zeros get a scale, too, and no scale is so small that it vanishes."""


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Each row in blocks of 1x128 values, the last one partial where need be (2412.19437, section 3.3).

    x: [N, C]. Returns e4m3 [N, C] and fp32 [N, ceil(C / 128)], the factors that `dequantize_rows` multiplies by: a
    block's largest magnitude / 448. A block that holds an infinity or NaN comes back as NaN.
    """
    rows, columns = x.shape
    blocks = F.pad(x.float(), (0, -columns % BLOCK)).view(rows, -(-columns // BLOCK), BLOCK)
    scales = blocks.abs().amax(-1).clamp_min_(_LEAST).div_(_LARGEST)
    quantized = (blocks / scales[..., None]).to(torch.float8_e4m3fn)
    return quantized.flatten(1)[:, :columns], scales


def dequantize_rows(quantized: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What `quantize_rows` was given, rounded: [N, C] in `dtype`."""
    return (quantized.float() * scales.repeat_interleave(BLOCK, 1)[:, : quantized.shape[1]]).to(dtype)


def dequantize_blocks(
    weight: torch.Tensor,
    scale_inv: torch.Tensor,
    block: tuple[int, int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """`weight * scale_inv` of its block, multiplied in fp32 and rounded once.

    Args:
        weight: [R, C], e4m3.
        scale_inv: [ceil(R / block[0]), ceil(C / block[1])], fp32 or e8m0: the factors to multiply by, despite the name
            they have in DeepSeek's files (2412.19437, section 3.3). The last row and column of blocks may be partial.
        block: rows and columns that share a scale.
        dtype: of the result.

    Returns:
        [R, C] in `dtype`.

    Raises:
        ValueError: when the scales do not fit the weight.
    """
    rows, columns = weight.shape
    expected = (-(-rows // block[0]), -(-columns // block[1]))
    if tuple(scale_inv.shape) != expected:
        raise ValueError(f"scales of a {rows}x{columns} weight: expected {expected}, found {tuple(scale_inv.shape)}")
    result = torch.empty(rows, columns, dtype=dtype, device=weight.device)
    scales = scale_inv.float().repeat_interleave(block[1], dim=1)[:, :columns]
    for strip, scale in enumerate(scales):  # a strip at a time: the fp32 product is never held whole
        at = slice(strip * block[0], (strip + 1) * block[0])
        result[at] = weight[at].float() * scale
    return result
