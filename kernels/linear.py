"""Matrix multiplication with a weight that never changes."""

import torch
import torch.nn.functional as F

_PACK_FROM = {torch.float32: 1 << 17, torch.bfloat16: 0}
"""Weight elements from which oneDNN's packed layout wins on a CPU. Measured with one thread, 512 x 1024: fp32, 32 rows,
152 against 354 us; bf16, 1 row, 23 against 42 us. Below, its fixed 10 us a call lose to a plain fp32 gemm."""
_PACK_ROWS = 32
"""Rows to lay the packed weight out for; a layout made for 32 also serves 1 and 128 well."""


class Linear:
    """y = x @ weight.T, with the weight in the layout that its device multiplies fastest.

    On a CPU a large weight is repacked once for oneDNN (the layout that torch.compile's CPU backend uses), which frees
    every call from reordering it.
    """

    def __init__(self, weight: torch.Tensor) -> None:
        """weight: [out, in]; taken over, do not use it afterwards."""
        self.out_features, self.in_features = weight.shape
        threshold = _PACK_FROM.get(weight.dtype) if weight.device.type == "cpu" else None
        self._packed = threshold is not None and weight.numel() >= threshold and torch._C._has_mkldnn
        if self._packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_ROWS)
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, in] -> [rows, out]."""
        if self._packed and x.shape[0]:
            out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._weight, None, "none", [], "")
            return out
        if self._packed:
            return x.new_empty((0, self.out_features))
        return F.linear(x, self._weight)
