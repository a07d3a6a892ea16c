"""Block-wise fp8 weights against the same product written element by element."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.checkpoints import quantise_blocks

from raysonar.kernels.fp8 import dequantize_blocks


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
