"""Weights in fp8 with a scale for each block."""

import torch


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
