"""Llama: a dense target, or a small draft."""

import torch

from raysonar.kernels.attention import paged_attention
from raysonar.kernels.elementwise import rms_norm, rotate
from raysonar.kernels.linear import Linear
from raysonar.model.batch import Batch
from raysonar.model.cache import KvCache
from raysonar.model.mlp import ShardedMlp
from raysonar.model.rope import interleave_order
from raysonar.model.spec import LlamaSpec
from raysonar.model.transformer import Transformer
from raysonar.model.weights import Weights
from raysonar.moe.executor import Pass


class GroupedAttention:
    """Grouped-query attention (2305.13245); the cache entry is a head's key and value side by side."""

    def __init__(self, spec: LlamaSpec, weights: Weights, prefix: str, layer: int) -> None:
        self._spec, self._layer, self._communicators = spec, layer, weights.communicators
        self._heads, self._kv_heads = spec.heads // weights.place.tensor, spec.kv_heads // weights.place.tensor
        rows = {"q": spec.heads * spec.head_dim, "k": spec.kv_heads * spec.head_dim, "v": spec.kv_heads * spec.head_dim}
        names = [(f"{prefix}.self_attn.{part}_proj.weight", count) for part, count in rows.items()]
        own = {part: weights.place.share(count) for part, count in rows.items()}
        qkv = weights.stacked(names, spec.hidden, rows=tuple(own.values()))
        # the checkpoint pairs channel i with i + head_dim/2; `rotate` pairs neighbours
        rotated = qkv[: (self._heads + self._kv_heads) * spec.head_dim].view(-1, spec.head_dim, spec.hidden)
        rotated.copy_(rotated[:, interleave_order(spec.head_dim)].clone())
        self._qkv = Linear(qkv)
        self._out = weights.linear_columns(f"{prefix}.self_attn.o_proj.weight", spec.hidden, rows["q"], own["q"])

    def __call__(self, x: torch.Tensor, batch: Batch, rotation: torch.Tensor, cache: KvCache) -> torch.Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]; writes the tokens' cache entries first."""
        spec, tokens, heads, kv_heads = self._spec, x.shape[0], self._heads, self._kv_heads
        qkv = self._qkv(x).view(tokens, heads + 2 * kv_heads, spec.head_dim)
        rotated = rotate(qkv[:, : heads + kv_heads], rotation)
        q, key, value = rotated[:, :heads], rotated[:, heads:], qkv[:, heads + kv_heads :]
        cache.write(self._layer, batch.entries, torch.cat((key, value), -1))
        out = paged_attention(
            q.reshape(tokens, kv_heads, heads // kv_heads, spec.head_dim),
            cache.layers[self._layer],
            batch.attention,
            scale=spec.head_dim**-0.5,
            keys=slice(spec.head_dim),
            values=slice(spec.head_dim, None),
        )
        own = self._out(out.reshape(tokens, heads * spec.head_dim))
        return self._communicators[batch.half].sum_over_row(own)


class LlamaLayer:
    """Attention, then a dense network, each on the normalised residual stream."""

    def __init__(self, spec: LlamaSpec, weights: Weights, layer: int) -> None:
        prefix = f"model.layers.{layer}"
        self._eps, self._layer, self._communicators = spec.eps, layer, weights.communicators
        self._attention_norm = weights.tensor(f"{prefix}.input_layernorm.weight", spec.hidden)
        self._attention = GroupedAttention(spec, weights, prefix, layer)
        self._mlp_norm = weights.tensor(f"{prefix}.post_attention_layernorm.weight", spec.hidden)
        self._mlp = ShardedMlp(spec.hidden, spec.intermediate, weights, f"{prefix}.mlp")

    def __call__(self, x: torch.Tensor, batch: Batch, rotation: torch.Tensor, cache: KvCache) -> Pass:
        """[tokens, hidden] -> [tokens, hidden]."""
        track = self._communicators[batch.half].track
        track.layer = self._layer
        with track.span("attention"):
            x = x + self._attention(rms_norm(x, self._attention_norm, self._eps), batch, rotation, cache)
        with track.span("dense network"):
            return x + self._mlp(rms_norm(x, self._mlp_norm, self._eps), batch.half)
        yield  # a pass that never waits


def load_llama(spec: LlamaSpec, weights: Weights, *, max_positions: int) -> Transformer:
    """Llama 2, 3 and their like."""
    layers = [LlamaLayer(spec, weights, layer) for layer in range(spec.layers)]
    shape = cache_shape(spec, weights.place.tensor)
    return Transformer(spec, weights, layers=layers, cache_shape=shape, max_positions=max_positions)


def cache_shape(spec: LlamaSpec, tensor: int = 1) -> tuple[int, int]:
    """(kv_heads, width) of a layer's cache entry on one of `tensor` ranks that share the heads."""
    return spec.kv_heads // tensor, 2 * spec.head_dim
