"""The stack that every target shares: embedding, decoder layers, final norm, head."""

from collections.abc import Callable, Sequence

import torch

from raysonar.kernels.elementwise import rms_norm
from raysonar.model.batch import Batch
from raysonar.model.cache import KvCache
from raysonar.model.rope import rotation_table
from raysonar.model.spec import ModelSpec
from raysonar.model.weights import Weights
from raysonar.moe.executor import Pass

Layer = Callable[[torch.Tensor, Batch, torch.Tensor, KvCache], Pass]
"""(x [tokens, hidden], batch, rotation, cache) -> [tokens, hidden]."""


class Transformer:
    """A decoder-only language model over the paged cache; embedding and head are split over a data-parallel row."""

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
        self.dtype = weights.dtype
        self._communicators = weights.communicators
        self._own = weights.place.share(spec.vocab)
        embedding = "model.embed_tokens.weight"
        self._embedding = weights.tensor(embedding, spec.vocab, spec.hidden, select=(self._own,))
        self.rotation = rotation_table(spec.rope, max_positions, weights.device)
        self._norm = weights.tensor("model.norm.weight", spec.hidden)
        head = embedding if spec.tied_embeddings else "lm_head.weight"
        self._head = weights.linear((head, spec.vocab), in_features=spec.hidden, rows=(self._own,))

    def __call__(self, tokens: torch.Tensor, batch: Batch, cache: KvCache) -> Pass:
        """tokens: int64 [T] -> the last layer's hidden states before the final norm, [T, hidden]."""
        x = self.embed(tokens, batch.half)
        rotation = self.rotation[batch.positions]
        for layer in self.layers:
            x = yield from layer(x, batch, rotation, cache)
        return x

    def embed(self, tokens: torch.Tensor, half: int) -> torch.Tensor:
        """int64 [T] -> [T, hidden]."""
        self._communicators[half].track.layer = None
        if len(self._embedding) == self.spec.vocab:
            return self._embedding[tokens]
        local = tokens - self._own.start
        foreign = (local < 0) | (local >= len(self._embedding))
        own = self._embedding[local.masked_fill(foreign, 0)].masked_fill(foreign[:, None], 0)
        return self._communicators[half].sum_over_row(own)

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm."""
        return rms_norm(hidden, self._norm, self.spec.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states before the final norm, [N, hidden] -> fp32 [N, vocab], on every rank of the row."""
        return self.head(self.norm(hidden))

    def head(self, normed: torch.Tensor) -> torch.Tensor:
        """Normed hidden states, [N, hidden] -> fp32 [N, vocab]."""
        self._communicators[0].track.layer = None
        return self._communicators[0].gather_over_row(self._head(normed).float(), self.spec.vocab, dim=1)
