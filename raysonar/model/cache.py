"""The paged KV cache."""

from collections.abc import Sequence

import torch


class KvCache:
    """Per layer, an entry for each token of each page; target and draft layers share pages and page tables.

    A layer's entry is [kv_heads, width]: the latent and the rotated key of MLA (one head), or key and value of Llama.
    One more page than asked for is kept as scratch: rows that are there for padding only write to it.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int]],
        *,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """shapes: (kv_heads, width) of each layer. Zeroed: masked entries are multiplied by 0, and 0 * NaN is NaN."""
        self.page_size = page_size
        self.scratch_page = pages
        self.layers = [
            torch.zeros((pages + 1, page_size, heads, width), dtype=dtype, device=device) for heads, width in shapes
        ]
        self._flat = [layer.view(-1, *layer.shape[2:]) for layer in self.layers]

    def write(self, layer: int, entries: torch.Tensor, values: torch.Tensor) -> None:
        """entries: int64 [tokens]; values: [tokens, kv_heads, width]."""
        self._flat[layer].index_copy_(0, entries, values)


def page_bytes(shapes: Sequence[tuple[int, int]], page_size: int, dtype: torch.dtype) -> int:
    """Bytes of one page over all layers."""
    return sum(heads * width for heads, width in shapes) * page_size * dtype.itemsize
