"""Block-wise fp8 weights against the same product written element by element."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import quantise_blocks

from raysonar.kernels.fp8 import dequantize_blocks, dequantize_rows, quantize_rows


def by_element(weight, scale, block, dtype):
    rows, columns = torch.arange(weight.shape[0]) // block[0], torch.arange(weight.shape[1]) // block[1]
    return (weight.float() * scale.float()[rows][:, columns]).to(dtype)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 16), st.integers(1, 16), st.integers(0, 1000))
@settings(max_examples=80, deadline=None)
def test_any_shape_with_partial_last_blocks(rows, columns, high, wide, seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-rows // high), -(-columns // wide), generator=generator) + 0.1
    for dtype in (torch.float32, torch.bfloat16):
        result = dequantize_blocks(weight, scale, (high, wide), dtype)
        assert result.dtype == dtype
        assert torch.equal(result, by_element(weight, scale, (high, wide), dtype))


@pytest.mark.parametrize("scales", ["float32", "ue8m0"])
def test_kv_a_projs_576_rows_take_five_scales(scales):
    weight = torch.randn(576, 200, generator=torch.Generator().manual_seed(0))
    quantised, scale = quantise_blocks(weight, scales)
    assert scale.shape == (5, 2)
    assert scale.dtype == (torch.float32 if scales == "float32" else torch.float8_e8m0fnu)
    result = dequantize_blocks(quantised, scale, dtype=torch.float32)
    assert torch.equal(result, by_element(quantised, scale, (128, 128), torch.float32))
    assert (result - weight).abs().max() <= weight.abs().max() / 16  # e4m3: half of the 3rd bit of mantissa


def test_scales_of_another_shape_are_refused():
    with pytest.raises(ValueError, match=r"576x200 weight: expected \(5, 2\), found \(4, 2\)"):
        dequantize_blocks(torch.zeros(576, 200).to(torch.float8_e4m3fn), torch.ones(4, 2))


def by_block(x):
    """`quantize_rows` and `dequantize_rows`, a block at a time."""
    out = torch.empty_like(x)
    for start in range(0, x.shape[1], 128):
        block = x[:, start : start + 128]
        scale = block.abs().amax(1, keepdim=True) / 448
        out[:, start : start + 128] = (block / scale).to(torch.float8_e4m3fn).float() * scale
    return out


@given(st.integers(0, 5), st.integers(1, 400), st.integers(-20, 20), st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_rows_come_back_rounded_to_4_bits_block_by_block(rows, columns, magnitude, seed):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 10.0**magnitude
    quantized, scales = quantize_rows(x)
    assert (quantized.dtype, scales.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert quantized.shape == x.shape
    assert scales.shape == (rows, -(-columns // 128))
    result = dequantize_rows(quantized, scales, torch.float32)
    torch.testing.assert_close(result, by_block(x), rtol=1e-6, atol=0)
    # 3 bits of mantissa are kept: half of the last is 2^-4; below the normal range, half of its step of 2^-9
    room = x.abs() / 16 + scales.repeat_interleave(128, 1)[:, :columns] * 2**-10
    assert ((result - x).abs() <= room * (1 + 1e-5)).all()


def test_blocks_of_zeros_of_the_least_numbers_and_of_the_largest():
    x = torch.zeros(4, 256)
    x[1, 128:], x[2, :128], x[3] = 1e-38, 3e38, torch.finfo(torch.bfloat16).max
    for dtype in (torch.float32, torch.bfloat16):
        result = dequantize_rows(*quantize_rows(x.to(dtype)), dtype)
        assert result.dtype == dtype
        assert result.isfinite().all()
        torch.testing.assert_close(result, x.to(dtype), rtol=1e-2, atol=1e-30)
    x[0, 5] = float("nan")
    result = dequantize_rows(*quantize_rows(x), torch.float32)
    assert result[0, :128].isnan().all(), "what is not a number must not look like one"
    assert result[0, 128:].isfinite().all()
    assert result[1:].isfinite().all()
