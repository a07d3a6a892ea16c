"""The stack that every target shares: embedding, decoder layers, final norm, head."""

from collections.abc import Callable, Sequence

import torch

from raysonar.kernels.elementwise import rms_norm
from raysonar.model.batch import Batch
from raysonar.model.cache import KvCache
from raysonar.model.rope import rotation_table
from raysonar.model.spec import ModelSpec
from raysonar.model.weights import Weights

Layer = Callable[[torch.Tensor, Batch, torch.Tensor, KvCache], torch.Tensor]
"""(x [tokens, hidden], batch, rotation, cache) -> [tokens, hidden]."""


class Transformer:
    """A decoder-only language model over the paged cache."""

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        *,
        layers: Sequence[Layer],
        cache_shape: tuple[int, int],
        max_positions: int,
    ) -> None:
        """cache_shape: (kv_heads, width) of one layer's cache entry."""
        self.spec = spec
        self.layers = layers
        self.cache_shapes = [cache_shape] * len(layers)
        self.embedding = weights.tensor("model.embed_tokens.weight", spec.vocab, spec.hidden)
        self.rotation = rotation_table(spec.rope, max_positions, weights.device)
        self._norm = weights.tensor("model.norm.weight", spec.hidden)
        head = "model.embed_tokens.weight" if spec.tied_embeddings else "lm_head.weight"
        self.head = weights.linear((head, spec.vocab), in_features=spec.hidden)

    def __call__(self, tokens: torch.Tensor, batch: Batch, cache: KvCache) -> torch.Tensor:
        """tokens: int64 [T] -> the last layer's hidden states before the final norm, [T, hidden]."""
        x = self.embedding[tokens]
        rotation = self.rotation[batch.positions]
        for layer in self.layers:
            x = layer(x, batch, rotation, cache)
        return x

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm."""
        return rms_norm(hidden, self._norm, self.spec.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states before the final norm, [N, hidden] -> fp32 [N, vocab]."""
        return self.head(self.norm(hidden)).float()
