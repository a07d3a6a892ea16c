"""A trainable DeepSeek-V3: latent attention, balanced sigmoid routing and one MTP module.

Written for training small models on one CPU thread. Experts are stacked to one tensor per projection, which is
split into the checkpoint's per-expert names at export (`demo_export`); everything else carries the names of the
Hugging Face checkpoint.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DemoConfig:
    """Dimensions under the checkpoint's own names."""

    vocab_size: int = 2048
    hidden_size: int = 192
    intermediate_size: int = 512
    moe_intermediate_size: int = 64
    num_hidden_layers: int = 6
    num_nextn_predict_layers: int = 1
    num_attention_heads: int = 6
    q_lora_rank: int = 96
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32
    qk_rope_head_dim: int = 16
    v_head_dim: int = 32
    n_routed_experts: int = 16
    n_shared_experts: int = 1
    num_experts_per_tok: int = 2
    n_group: int = 4
    topk_group: int = 2
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.0
    first_k_dense_replace: int = 1
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 512

    def huggingface(self, begin: int, end: int, pad: int) -> dict[str, Any]:
        """The export's config.json."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            **asdict(self),
            "num_key_value_heads": self.num_attention_heads,
            "moe_layer_freq": 1,
            "ep_size": 1,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "rope_scaling": None,
            "rope_interleave": True,
            "tie_word_embeddings": False,
            "use_cache": True,
            "mtp_hidden": "pre_norm",
            "bos_token_id": begin,
            "eos_token_id": end,
            "pad_token_id": pad,
            "torch_dtype": "bfloat16",
        }


class Norm(nn.Module):
    """RMS normalisation."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


def linear(inputs: int, outputs: int, scale: float = 1.0) -> nn.Linear:
    """A bias-free projection that keeps the variance of its input times `scale` squared."""
    layer = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(layer.weight, std=scale * inputs**-0.5)
    return layer


def rope_table(config: DemoConfig, length: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines, one column for each interleaved pair."""
    rotary = config.qk_rope_head_dim
    frequencies = config.rope_theta ** (-torch.arange(0, rotary, 2, dtype=torch.float32) / rotary)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (0, 1), (2, 3), ... of the last dimension."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)


class Attention(nn.Module):
    """Multi-head latent attention, without a cache: training sees whole sequences."""

    def __init__(self, config: DemoConfig, depth_scale: float) -> None:
        super().__init__()
        c = self.config = config
        self.q_a_proj = linear(c.hidden_size, c.q_lora_rank)
        self.q_a_layernorm = Norm(c.q_lora_rank, c.rms_norm_eps)
        self.q_b_proj = linear(c.q_lora_rank, c.num_attention_heads * (c.qk_nope_head_dim + c.qk_rope_head_dim))
        self.kv_a_proj_with_mqa = linear(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim)
        self.kv_a_layernorm = Norm(c.kv_lora_rank, c.rms_norm_eps)
        self.kv_b_proj = linear(c.kv_lora_rank, c.num_attention_heads * (c.qk_nope_head_dim + c.v_head_dim))
        self.o_proj = linear(c.num_attention_heads * c.v_head_dim, c.hidden_size, depth_scale)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        c = self.config
        batch, length, _ = x.shape
        heads = c.num_attention_heads
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(batch, length, heads, -1).transpose(1, 2)
        q_nope, q_rope = q.split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split((c.kv_lora_rank, c.qk_rope_head_dim), dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(batch, length, heads, -1).transpose(1, 2)
        k_nope, v = kv.split((c.qk_nope_head_dim, c.v_head_dim), dim=-1)
        k_rope = rotate(k_rope, cos, sin).to(k_nope.dtype)[:, None].expand(-1, heads, -1, -1)
        q = torch.cat((q_nope, rotate(q_rope, cos, sin).to(q_nope.dtype)), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        # At these lengths plain matrix products are faster on a CPU than the fused kernel.
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
        out = scores.masked_fill(future, float("-inf")).softmax(-1).to(v.dtype) @ v
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected


class Mlp(nn.Module):
    """Gated feed-forward layer."""

    def __init__(self, hidden: int, inner: int, depth_scale: float) -> None:
        super().__init__()
        self.gate_proj = linear(hidden, inner)
        self.up_proj = linear(hidden, inner)
        self.down_proj = linear(inner, hidden, depth_scale)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Gate(nn.Module):
    """Group-limited sigmoid router; its bias steers the choice of experts, never their weights."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.randn(config.n_routed_experts, config.hidden_size) * config.hidden_size**-0.5)
        self.e_score_correction_bias: Tensor
        self.register_buffer("e_score_correction_bias", torch.zeros(config.n_routed_experts))
        self.load: Tensor
        self.register_buffer("load", torch.zeros(config.n_routed_experts), persistent=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        with torch.autocast("cpu", enabled=False):
            scores = F.linear(x.float(), self.weight.float()).sigmoid()
        biased = scores.detach() + self.e_score_correction_bias
        groups = biased.view(-1, c.n_group, c.n_routed_experts // c.n_group)
        best = groups.topk(2, dim=-1).values.sum(-1).topk(c.topk_group, dim=-1).indices
        rejected = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, False)
        chosen = groups.masked_fill(rejected[..., None], float("-inf")).flatten(1).topk(c.num_experts_per_tok).indices
        weights = scores.gather(1, chosen)
        if c.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self.training:
            self.load += torch.bincount(chosen.flatten(), minlength=c.n_routed_experts)
        return chosen, weights * c.routed_scaling_factor

    @torch.no_grad()
    def balance(self, speed: float) -> None:
        """Raise the bias of experts below the mean load and lower it above.

        Adding a constant to every bias changes no choice, so the lowest is kept at zero: scores with their bias
        stay positive, and implementations that fill rejected groups with zero choose as those with -inf do.
        """
        self.e_score_correction_bias += speed * torch.sign(self.load.mean() - self.load)
        self.e_score_correction_bias -= self.e_score_correction_bias.min()
        self.load.zero_()


class Experts(nn.Module):
    """All routed experts, gate and up projection stacked."""

    def __init__(self, config: DemoConfig, depth_scale: float) -> None:
        super().__init__()
        e, h, i = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.gate_up_proj = nn.Parameter(torch.randn(e, 2 * i, h) * h**-0.5)
        self.down_proj = nn.Parameter(torch.randn(e, h, i) * i**-0.5 * depth_scale)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Tokens are sorted by expert so that each expert multiplies one contiguous block."""
        order = chosen.flatten().argsort()
        counts = torch.bincount(chosen.flatten(), minlength=self.down_proj.shape[0]).tolist()
        source = order // chosen.shape[1]
        blocks = []
        for expert, block in enumerate(torch.split(x[source], counts)):
            gate, up = F.linear(block, self.gate_up_proj[expert]).chunk(2, dim=-1)
            blocks.append(F.linear(F.silu(gate) * up, self.down_proj[expert]))
        out = torch.cat(blocks) * weights.flatten()[order, None]
        return torch.zeros(x.shape, dtype=out.dtype).index_add(0, source, out)


class Moe(nn.Module):
    """Routed experts plus the shared one."""

    def __init__(self, config: DemoConfig, depth_scale: float) -> None:
        super().__init__()
        self.gate = Gate(config)
        self.experts = Experts(config, depth_scale)
        shared = config.moe_intermediate_size * config.n_shared_experts
        self.shared_experts = Mlp(config.hidden_size, shared, depth_scale)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.view(-1, x.shape[-1])
        out: Tensor = self.experts(flat, *self.gate(flat)) + self.shared_experts(flat)
        return out.view(x.shape)


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, config: DemoConfig, dense: bool) -> None:
        super().__init__()
        scale = (2 * config.num_hidden_layers) ** -0.5
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, scale)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size, scale) if dense else Moe(config, scale)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class SharedHead(nn.Module):
    """The MTP module's own norm before the main model's head."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class MtpBlock(Block):
    """Multi-token prediction: the next token's embedding and the hidden state to the token after that."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__(config, dense=False)
        self.enorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = linear(2 * config.hidden_size, config.hidden_size)
        self.shared_head = SharedHead(config)

    def predict(self, hidden: Tensor, following: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Hidden states, ready for the head, that predict the token after `following`."""
        joined = torch.cat((self.enorm(following), self.hnorm(hidden)), dim=-1)
        out: Tensor = self.shared_head.norm(self(self.eh_proj(joined), cos, sin))
        return out


class Backbone(nn.Module):
    """Embedding, decoder layers and final norm, under the name `model` in the checkpoint."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.2)
        blocks: list[Block] = [Block(config, i < config.first_k_dense_replace) for i in range(config.num_hidden_layers)]
        blocks += [MtpBlock(config) for _ in range(config.num_nextn_predict_layers)]
        self.layers = nn.ModuleList(blocks)
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class DemoModel(nn.Module):
    """The target model with its MTP module at layer index `num_hidden_layers`."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = linear(config.hidden_size, config.vocab_size, 0.5)
        cos, sin = rope_table(config, config.max_position_embeddings)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def hidden(self, ids: Tensor) -> Tensor:
        """The last layer's output, before the final norm."""
        x: Tensor = self.model.embed_tokens(ids)
        for block in self.model.layers[: self.config.num_hidden_layers]:
            x = block(x, self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])
        return x

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of every position."""
        out: Tensor = self.lm_head(self.model.norm(self.hidden(ids)))
        return out

    def mtp_hidden(self, ids: Tensor, hidden: Tensor) -> Tensor:
        """For position i, what predicts token i + 2 (one position less than `ids` has)."""
        length = ids.shape[1] - 1
        block = self.model.layers[self.config.num_hidden_layers]
        assert isinstance(block, MtpBlock)
        following = self.model.embed_tokens(ids[:, 1:])
        return block.predict(hidden[:, :-1], following, self.cos[:length], self.sin[:length])

    def losses(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss of the next token and of the MTP module, over labelled positions only."""
        hidden = self.hidden(ids)
        main = _head_loss(self.lm_head, self.model.norm(hidden[:, :-1]), labels[:, 1:])
        if not self.config.num_nextn_predict_layers:
            return main, torch.zeros(())
        return main, _head_loss(self.lm_head, self.mtp_hidden(ids, hidden)[:, :-1], labels[:, 2:])

    def balance(self, speed: float) -> None:
        """One step of load balancing in every router."""
        for module in self.modules():
            if isinstance(module, Gate):
                module.balance(speed)


def _head_loss(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    kept = labels != -100
    return F.cross_entropy(head(hidden[kept]).float(), labels[kept])
