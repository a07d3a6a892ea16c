"""A trainable Llama-style dense model: the demo's separate draft for target-draft speculation."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raysonar.training.demo_model import Mlp, Norm, linear


@dataclass(frozen=True)
class DraftConfig:
    """Dimensions under the checkpoint's own names; embedding and head are tied."""

    vocab_size: int = 2048
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 512

    def huggingface(self, begin: int, end: int, pad: int) -> dict[str, Any]:
        """The export's config.json."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **asdict(self),
            "head_dim": self.hidden_size // self.num_attention_heads,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "mlp_bias": False,
            "initializer_range": 0.02,
            "rope_scaling": None,
            "tie_word_embeddings": True,
            "use_cache": True,
            "bos_token_id": begin,
            "eos_token_id": end,
            "pad_token_id": pad,
            "torch_dtype": "bfloat16",
        }


class DraftAttention(nn.Module):
    """Grouped-query attention with Llama's half-split rotation."""

    def __init__(self, config: DraftConfig, depth_scale: float) -> None:
        super().__init__()
        c = self.config = config
        self.head = c.hidden_size // c.num_attention_heads
        self.q_proj = linear(c.hidden_size, c.num_attention_heads * self.head)
        self.k_proj = linear(c.hidden_size, c.num_key_value_heads * self.head)
        self.v_proj = linear(c.hidden_size, c.num_key_value_heads * self.head)
        self.o_proj = linear(c.num_attention_heads * self.head, c.hidden_size, depth_scale)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            projection(x).view(batch, length, -1, self.head).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (torch.cat(_rotate_halves(t, cos, sin), dim=-1) for t in (q, k))
        groups = self.config.num_attention_heads // self.config.num_key_value_heads
        k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = (q * self.head**-0.5) @ k.transpose(-1, -2)
        out = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        projected: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return projected


def _rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    first, second = x.chunk(2, dim=-1)
    return first * cos - second * sin, second * cos + first * sin


class DraftBlock(nn.Module):
    """One decoder layer."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        scale = (2 * config.num_hidden_layers) ** -0.5
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config, scale)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Mlp(config.hidden_size, config.intermediate_size, scale)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class DraftBackbone(nn.Module):
    """Everything under the name `model` in the checkpoint."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        nn.init.normal_(self.embed_tokens.weight, std=0.5 * config.hidden_size**-0.5)
        self.layers = nn.ModuleList([DraftBlock(config) for _ in range(config.num_hidden_layers)])
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)


class DraftModel(nn.Module):
    """The draft, with the interface that the trainer expects of a model."""

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        self.config = config
        self.model = DraftBackbone(config)
        head = config.hidden_size // config.num_attention_heads
        frequencies = config.rope_theta ** (-torch.arange(0, head, 2, dtype=torch.float32) / head)
        angles = torch.arange(config.max_position_embeddings, dtype=torch.float32)[:, None] * frequencies
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def hidden(self, ids: Tensor) -> Tensor:
        """The final norm's output."""
        x: Tensor = self.model.embed_tokens(ids)
        for block in self.model.layers:
            x = block(x, self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])
        out: Tensor = self.model.norm(x)
        return out

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of every position."""
        return F.linear(self.hidden(ids), self.model.embed_tokens.weight)

    def losses(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss over labelled positions; there is no second head."""
        kept = labels[:, 1:] != -100
        logits = F.linear(self.hidden(ids)[:, :-1][kept], self.model.embed_tokens.weight)
        return F.cross_entropy(logits, labels[:, 1:][kept]), torch.zeros(())

    def balance(self, speed: float) -> None:
        """A dense model has nothing to balance."""
