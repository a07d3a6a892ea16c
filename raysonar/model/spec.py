"""What a model is, as plain typed numbers, read from config.json by `raysonar.model.folder`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RopeSpec:
    """Rotary position embedding over `dim` channels.

    kind "yarn" (2309.00071): the cos/sin multiplier is mscale(factor, mscale) / mscale(factor, mscale_all_dim), unless
    attention_factor is given; "llama3" is Llama 3.1's frequency-wise interpolation; "linear" divides positions.
    """

    dim: int
    theta: float
    kind: Literal["default", "yarn", "llama3", "linear"] = "default"
    factor: float = 1.0
    original_max_positions: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True, kw_only=True)
class MlaSpec:
    """Multi-head latent attention (DeepSeek-V2, 2405.04434, section 2.1)."""

    heads: int
    q_lora_rank: int | None
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int

    softmax_scale: float
    """(nope_dim + rope_dim)^-0.5, times YaRN's mscale(factor, mscale_all_dim)^2 where that applies."""
    interleaved: bool = True
    """RoPE pairs are (2i, 2i+1) in the checkpoint; False: (i, i + dim/2)."""
    norm_eps: float = 1e-6
    """Of the norms of both latents, which do not follow rms_norm_eps in DeepSeek's code, nor in transformers."""

    @property
    def q_dim(self) -> int:
        """Channels of a head's query."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Routed and shared experts (DeepSeek-V3, 2412.19437, section 2.1.2)."""

    experts: int
    top_k: int
    intermediate: int
    shared_experts: int
    scoring: Literal["softmax", "sigmoid"]
    selection: Literal["greedy", "group_limited_greedy", "noaux_tc"]
    groups: int = 1
    top_groups: int = 1
    norm_topk_prob: bool = False
    routed_scaling_factor: float = 1.0


@dataclass(frozen=True, kw_only=True)
class DeepseekSpec:
    """DeepSeek V2, V3 and R1."""

    vocab: int
    hidden: int
    layers: int
    intermediate: int
    eps: float
    max_positions: int
    tied_embeddings: bool
    rope: RopeSpec
    mla: MlaSpec
    moe: MoeSpec | None
    """None: every layer is dense."""
    first_dense: int
    """Layers before this one are dense."""
    moe_every: int = 1
    """Of the others, layer i is MoE when i is a multiple of this."""
    mtp_modules: int = 0
    mtp_hidden: Literal["pre_norm", "post_norm"] = "pre_norm"


@dataclass(frozen=True, kw_only=True)
class LlamaSpec:
    """Llama: a dense target or draft."""

    vocab: int
    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    max_positions: int
    tied_embeddings: bool
    rope: RopeSpec


ModelSpec = DeepseekSpec | LlamaSpec
