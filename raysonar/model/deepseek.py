"""DeepSeek V2, V3 and R1: multi-head latent attention in absorbed form, dense and mixture-of-experts layers."""

import torch

from raysonar.kernels.attention import paged_attention
from raysonar.kernels.elementwise import rms_norm, rotate
from raysonar.kernels.linear import Linear
from raysonar.model.batch import Batch
from raysonar.model.cache import KvCache
from raysonar.model.mlp import ShardedMlp
from raysonar.model.moe import Moe
from raysonar.model.rope import interleave_order
from raysonar.model.spec import DeepseekSpec, MoeSpec
from raysonar.model.transformer import Transformer
from raysonar.model.weights import Weights
from raysonar.moe.executor import Pass


class LatentAttention:
    """MLA (2405.04434, section 2.1): the cache holds one latent and one rotated key a token, shared by all heads.

    Keys and values are never expanded: the key up-projection is absorbed into the query, the value up-projection into
    the output (2405.04434, section 2.1.2). Heads are split over a data-parallel row, the
    latents kept by every rank of it.
    """

    def __init__(self, spec: DeepseekSpec, weights: Weights, prefix: str, layer: int) -> None:
        mla = self._mla = spec.mla
        self._layer, self._communicators = layer, weights.communicators
        heads = weights.place.share(mla.heads)
        self._heads = heads.stop - heads.start
        q_rows, own_q = mla.heads * mla.q_dim, _rows(heads, mla.q_dim)
        kv_rows = mla.kv_lora_rank + mla.rope_dim
        name = f"{prefix}.self_attn."
        order = self._rope_order()
        kv_a = weights.tensor(f"{name}kv_a_proj_with_mqa.weight", kv_rows, spec.hidden)
        kv_a[mla.kv_lora_rank :] = kv_a[mla.kv_lora_rank :][order]
        if mla.q_lora_rank is None:
            down = self._interleaved(weights.tensor(f"{name}q_proj.weight", q_rows, spec.hidden, select=(own_q,)))
            self._q_norm, self._q_up = None, None
        else:
            down = weights.tensor(f"{name}q_a_proj.weight", mla.q_lora_rank, spec.hidden)
            self._q_norm = weights.tensor(f"{name}q_a_layernorm.weight", mla.q_lora_rank)
            up = weights.tensor(f"{name}q_b_proj.weight", q_rows, mla.q_lora_rank, select=(own_q,))
            self._q_up = Linear(self._interleaved(up))
        self._down = Linear(torch.cat((down, kv_a)))
        self._split = (down.shape[0], mla.kv_lora_rank, mla.rope_dim)
        self._kv_norm = weights.tensor(f"{name}kv_a_layernorm.weight", mla.kv_lora_rank)
        head_rows = mla.nope_dim + mla.v_dim
        up_shape, own_up = (mla.heads * head_rows, mla.kv_lora_rank), _rows(heads, head_rows)
        up = weights.tensor(f"{name}kv_b_proj.weight", *up_shape, select=(own_up,)).view(self._heads, head_rows, -1)
        self._key_up = up[:, : mla.nope_dim].clone()  # [heads, nope, latent]; a view of one head would keep all of `up`
        self._value_up = up[:, mla.nope_dim :].mT.contiguous()  # [heads, latent, v]
        out_columns = mla.heads * mla.v_dim
        self._out = weights.linear_columns(f"{name}o_proj.weight", spec.hidden, out_columns, _rows(heads, mla.v_dim))

    def __call__(self, x: torch.Tensor, batch: Batch, rotation: torch.Tensor, cache: KvCache) -> torch.Tensor:
        """x: [tokens, hidden] -> [tokens, hidden]; writes the tokens' cache entries first."""
        mla, tokens = self._mla, x.shape[0]
        q, latent, key_rope = self._down(x).split_with_sizes(self._split, -1)
        if self._q_up is not None and self._q_norm is not None:
            q = self._q_up(rms_norm(q, self._q_norm, mla.norm_eps))
        q_nope, q_rope = q.view(tokens, self._heads, mla.q_dim).split_with_sizes((mla.nope_dim, mla.rope_dim), -1)
        rotated = rotate(torch.cat((q_rope, key_rope[:, None]), 1), rotation)
        latent = rms_norm(latent, self._kv_norm, mla.norm_eps)
        cache.write(self._layer, batch.entries, torch.cat((latent, rotated[:, -1]), -1)[:, None])
        absorbed = torch.bmm(q_nope.transpose(0, 1), self._key_up).transpose(0, 1)
        out = paged_attention(
            torch.cat((absorbed, rotated[:, :-1]), -1)[:, None],
            cache.layers[self._layer],
            batch.attention,
            scale=mla.softmax_scale,
            keys=slice(None),
            values=slice(mla.kv_lora_rank),
        )
        values = torch.bmm(out.squeeze(1).transpose(0, 1), self._value_up)
        own = self._out(values.transpose(0, 1).reshape(tokens, self._heads * mla.v_dim))
        return self._communicators[batch.half].sum_over_row(own)

    def _rope_order(self) -> torch.Tensor:
        dim = self._mla.rope_dim
        return torch.arange(dim) if self._mla.interleaved else interleave_order(dim)

    def _interleaved(self, q: torch.Tensor) -> torch.Tensor:
        """The query projection with its RoPE rows in pairs (2i, 2i + 1)."""
        mla = self._mla
        heads = q.view(self._heads, mla.q_dim, q.shape[-1])
        heads[:, mla.nope_dim :] = heads[:, mla.nope_dim :][:, self._rope_order()]
        return q


class DecoderLayer:
    """Attention, then a dense or mixture-of-experts network, each on the normalised residual stream."""

    def __init__(self, spec: DeepseekSpec, weights: Weights, prefix: str, *, layer: int, moe: MoeSpec | None) -> None:
        self._eps, self._layer, self._communicators = spec.eps, layer, weights.communicators
        self._attention_norm = weights.tensor(f"{prefix}.input_layernorm.weight", spec.hidden)
        self._attention = LatentAttention(spec, weights, prefix, layer)
        self._mlp_norm = weights.tensor(f"{prefix}.post_attention_layernorm.weight", spec.hidden)
        self._mlp: ShardedMlp | Moe
        if moe is None:
            self._mlp = ShardedMlp(spec.hidden, spec.intermediate, weights, f"{prefix}.mlp")
        else:
            self._mlp = Moe(spec.hidden, moe, weights, f"{prefix}.mlp")

    @property
    def moe(self) -> Moe | None:
        """Its experts, if it has any."""
        return self._mlp if isinstance(self._mlp, Moe) else None

    def __call__(self, x: torch.Tensor, batch: Batch, rotation: torch.Tensor, cache: KvCache) -> Pass:
        """[tokens, hidden] -> [tokens, hidden]."""
        track = self._communicators[batch.half].track
        track.layer = self._layer
        with track.span("attention"):
            x = x + self._attention(rms_norm(x, self._attention_norm, self._eps), batch, rotation, cache)
        normed = rms_norm(x, self._mlp_norm, self._eps)
        if isinstance(self._mlp, Moe):
            return x + (yield from self._mlp(normed, batch))
        with track.span("dense network"):
            return x + self._mlp(normed, batch.half)


def load_deepseek(spec: DeepseekSpec, weights: Weights, *, max_positions: int) -> Transformer:
    """The target model, without its MTP modules."""
    layers = [
        DecoderLayer(spec, weights, f"model.layers.{i}", layer=i, moe=spec.moe if is_moe_layer(spec, i) else None)
        for i in range(spec.layers)
    ]
    return Transformer(spec, weights, layers=layers, cache_shape=cache_shape(spec), max_positions=max_positions)


def is_moe_layer(spec: DeepseekSpec, layer: int) -> bool:
    """Whether a layer has experts."""
    return spec.moe is not None and layer >= spec.first_dense and layer % spec.moe_every == 0


def cache_shape(spec: DeepseekSpec) -> tuple[int, int]:
    """(kv_heads, width) of a layer's cache entry."""
    return 1, spec.mla.kv_lora_rank + spec.mla.rope_dim


def _rows(heads: slice, size: int) -> slice:
    """The rows of a matrix that belong to `heads`, `size` rows a head."""
    return slice(heads.start * size, heads.stop * size)
