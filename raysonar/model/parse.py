"""config.json to ModelSpec. Keys that are absent take the defaults of transformers' configuration classes."""

import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

from raysonar.errors import ModelFolderError
from raysonar.model.rope import yarn_mscale
from raysonar.model.spec import DeepseekSpec, LlamaSpec, MlaSpec, ModelSpec, MoeSpec, RopeSpec

_log = logging.getLogger(__name__)
_ARCHITECTURES = {
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "llama": "LlamaForCausalLM",
}
_REQUIRED: Final = object()
_Choice = TypeVar("_Choice", bound=str)


class ConfigReader:
    """Typed look-ups in a JSON object; every error names the file, the key, expected and found."""

    def __init__(self, values: Mapping[str, Any], source: Path, prefix: str = "") -> None:
        self._values = values
        self.source = source
        self._prefix = prefix

    def get(self, key: str) -> Any:
        """The value as it stands; None when absent."""
        return self._values.get(key)

    def has(self, key: str) -> bool:
        return key in self._values

    def error(self, key: str, expected: str) -> ModelFolderError:
        """The error to raise when `key` does not hold what was expected."""
        found = repr(self._values[key]) if key in self._values else "no such key"
        return ModelFolderError(f"{self.source}: {self._prefix}{key}: expected {expected}, found {found}")

    def section(self, key: str) -> "ConfigReader":
        """The object under `key`."""
        value = self._values.get(key)
        if not isinstance(value, dict):
            raise self.error(key, "a JSON object")
        return ConfigReader(value, self.source, f"{self._prefix}{key}.")

    def integer(self, key: str, default: Any = _REQUIRED, *, least: int = 1) -> int:
        """An integer of at least `least`, below 2^31."""
        value = self._values.get(key, default)
        if type(value) is not int or value < least:
            raise self.error(key, f"an integer of at least {least}")
        if value >= 2**31:
            raise self.error(key, "an integer below 2^31")
        return value

    def optional_integer(self, key: str, default: int | None, *, least: int = 1) -> int | None:
        """An integer, or null."""
        return None if self._values.get(key, default) is None else self.integer(key, default, least=least)

    def number(self, key: str, default: Any = _REQUIRED) -> float:
        """A finite number above zero."""
        value = self._values.get(key, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.error(key, "a number above 0")
        return float(value)

    def optional_number(self, key: str) -> float | None:
        """A finite number that is not negative; None when absent or null."""
        value = self._values.get(key)
        if value is not None and (type(value) not in (int, float) or not 0 <= value < math.inf):
            raise self.error(key, "a number of at least 0")
        return None if value is None else float(value)

    def flag(self, key: str, default: bool) -> bool:
        """A boolean; null is the default."""
        value = default if self._values.get(key) is None else self._values[key]
        if type(value) is not bool:
            raise self.error(key, "true or false")
        return value

    def choice(self, key: str, options: tuple[_Choice, ...], default: _Choice | None = None) -> _Choice:
        """One of `options`; null is the default."""
        value = default if self._values.get(key) is None else self._values[key]
        for option in options:
            if value == option:
                return option
        raise self.error(key, " or ".join(options))


def parse_spec(config: ConfigReader) -> ModelSpec:
    """The model that config.json describes. Raises ModelFolderError for anything that raysonar does not run."""
    architecture = _architecture(config)
    for key in ("attention_bias", "mlp_bias"):
        if config.flag(key, False):
            raise config.error(key, "false (biases are not supported)")
    config.choice("hidden_act", ("silu",), "silu")
    if architecture == "LlamaForCausalLM":
        return _llama(config)
    return _deepseek(config, version=2 if architecture == "DeepseekV2ForCausalLM" else 3)


def _architecture(config: ConfigReader) -> str:
    """By `architectures`, else by `model_type`: other types (Kimi K2's) declare one of these architectures."""
    known = tuple(_ARCHITECTURES.values())
    declared = config.get("architectures")
    if declared:
        if not isinstance(declared, list) or declared[0] not in known:
            raise config.error("architectures", f"one of {', '.join(known)}")
        architecture: str = declared[0]
        return architecture
    return _ARCHITECTURES[config.choice("model_type", tuple(_ARCHITECTURES))]


def _llama(config: ConfigReader) -> LlamaSpec:
    hidden, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    kv_heads = config.optional_integer("num_key_value_heads", None) or heads
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"a divisor of num_attention_heads, {heads}")
    head_dim = config.optional_integer("head_dim", None) or hidden // heads
    max_positions = config.integer("max_position_embeddings", 2048)
    return LlamaSpec(
        vocab=config.integer("vocab_size"),
        hidden=hidden,
        layers=config.integer("num_hidden_layers"),
        intermediate=config.integer("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=config.number("rms_norm_eps", 1e-6),
        max_positions=max_positions,
        tied_embeddings=config.flag("tie_word_embeddings", False),
        rope=parse_rope(config, head_dim, max_positions),
    )


def _deepseek(config: ConfigReader, version: Literal[2, 3]) -> DeepseekSpec:
    if config.get("index_topk") is not None:
        raise config.error("index_topk", "no such key (DeepSeek-V3.2's sparse attention is not supported)")
    rope_dim = config.integer("qk_rope_head_dim", 64)
    max_positions = config.integer("max_position_embeddings", 2048 if version == 2 else 4096)
    rope = parse_rope(config, rope_dim, max_positions)
    return DeepseekSpec(
        vocab=config.integer("vocab_size"),
        hidden=config.integer("hidden_size"),
        layers=config.integer("num_hidden_layers"),
        intermediate=config.integer("intermediate_size"),
        eps=config.number("rms_norm_eps", 1e-6),
        max_positions=max_positions,
        tied_embeddings=config.flag("tie_word_embeddings", False),
        rope=rope,
        mla=_mla(config, rope),
        moe=_moe(config, version) if config.optional_integer("n_routed_experts", 64 if version == 2 else 256) else None,
        first_dense=config.integer("first_k_dense_replace", 0 if version == 2 else 3, least=0),
        moe_every=config.integer("moe_layer_freq", 1),
        mtp_modules=_mtp_modules(config) if version == 3 else 0,
        mtp_hidden=config.choice("mtp_hidden", ("pre_norm", "post_norm"), "pre_norm"),
    )


def _mla(config: ConfigReader, rope: RopeSpec) -> MlaSpec:
    nope_dim = config.integer("qk_nope_head_dim", 128)
    scale = (nope_dim + rope.dim) ** -0.5
    if rope.kind != "default" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return MlaSpec(
        heads=config.integer("num_attention_heads"),
        q_lora_rank=config.optional_integer("q_lora_rank", 1536),
        kv_lora_rank=config.integer("kv_lora_rank", 512),
        nope_dim=nope_dim,
        rope_dim=rope.dim,
        v_dim=config.integer("v_head_dim", 128),
        softmax_scale=scale,
        interleaved=config.flag("rope_interleave", True),
    )


def _moe(config: ConfigReader, version: Literal[2, 3]) -> MoeSpec:
    moe = _moe_v2(config) if version == 2 else _moe_v3(config)
    if moe.experts % moe.groups:
        raise config.error("n_group", f"a divisor of n_routed_experts, {moe.experts}")
    if moe.top_groups > moe.groups:
        raise config.error("topk_group", f"at most n_group, {moe.groups}")
    selectable = moe.top_groups * (moe.experts // moe.groups)
    if moe.top_k > selectable:
        raise config.error("num_experts_per_tok", f"at most the {selectable} experts of {moe.top_groups} groups")
    return moe


def _moe_v2(config: ConfigReader) -> MoeSpec:
    config.choice("scoring_func", ("softmax",), "softmax")
    selection: Literal["greedy", "group_limited_greedy"] = config.choice(
        "topk_method", ("greedy", "group_limited_greedy"), "greedy"
    )
    if config.flag("norm_topk_prob", False):
        # No published V2 sets it. DeepSeek's own code then normalises and leaves out routed_scaling_factor.
        _log.warning(
            "%s: norm_topk_prob is true, which has no effect on DeepSeek-V2, as in transformers", config.source
        )
    grouped = selection == "group_limited_greedy"
    return MoeSpec(
        experts=config.integer("n_routed_experts", 64),
        top_k=config.integer("num_experts_per_tok"),
        intermediate=config.integer("moe_intermediate_size", 1407),
        shared_experts=config.optional_integer("n_shared_experts", 2, least=0) or 0,
        scoring="softmax",
        selection=selection,
        groups=config.integer("n_group") if grouped else 1,
        top_groups=config.integer("topk_group") if grouped else 1,
        norm_topk_prob=False,
        routed_scaling_factor=config.number("routed_scaling_factor", 1.0),
    )


def _moe_v3(config: ConfigReader) -> MoeSpec:
    config.choice("scoring_func", ("sigmoid",), "sigmoid")
    config.choice("topk_method", ("noaux_tc",), "noaux_tc")
    experts, groups = config.integer("n_routed_experts", 256), config.integer("n_group", 8)
    if experts < 2 * groups:  # a group's score is the sum of its two best experts
        raise config.error("n_group", f"groups of at least 2 of the {experts} experts")
    return MoeSpec(
        experts=experts,
        top_k=config.integer("num_experts_per_tok", 8),
        intermediate=config.integer("moe_intermediate_size", 2048),
        shared_experts=config.optional_integer("n_shared_experts", 1, least=0) or 0,
        scoring="sigmoid",
        selection="noaux_tc",
        groups=groups,
        top_groups=config.integer("topk_group", 4),
        norm_topk_prob=config.flag("norm_topk_prob", True),
        routed_scaling_factor=config.number("routed_scaling_factor", 2.5),
    )


def _mtp_modules(config: ConfigReader) -> int:
    """`num_nextn_predict_layers` in published files; transformers' class names it `num_mtp_layers`."""
    key = "num_mtp_layers" if config.has("num_mtp_layers") else "num_nextn_predict_layers"
    return config.optional_integer(key, 1, least=0) or 0


def parse_rope(config: ConfigReader, dim: int, max_positions: int) -> RopeSpec:
    """`rope_parameters` (transformers 5), or `rope_theta` and `rope_scaling` (before), over `dim` channels."""
    if dim % 2:
        raise config.error("qk_rope_head_dim" if config.has("qk_rope_head_dim") else "head_dim", "an even number")
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    rope = config.section(key) if config.get(key) else ConfigReader({}, config.source, "rope_parameters.")
    for holder in (config, rope):
        if (holder.optional_number("partial_rotary_factor") or 1.0) != 1.0:
            raise holder.error("partial_rotary_factor", "1 (partial rotary embeddings are not supported)")
    kind = rope.choice("rope_type" if rope.has("rope_type") else "type", _ROPE_KINDS, "default")
    theta = (rope if rope.has("rope_theta") else config).number("rope_theta", 10000.0)
    original = rope.optional_integer("original_max_position_embeddings", None)
    if original is None:
        original = config.optional_integer("original_max_position_embeddings", None) or max_positions
    if kind == "default":
        return RopeSpec(dim=dim, theta=theta)
    if kind == "yarn":
        return _yarn(rope, dim, theta, original, max_positions)
    factor = rope.number("factor")
    if kind == "linear":
        return RopeSpec(dim=dim, theta=theta, kind="linear", factor=factor)
    return RopeSpec(
        dim=dim,
        theta=theta,
        kind="llama3",
        factor=factor,
        original_max_positions=original,
        low_freq_factor=rope.number("low_freq_factor"),
        high_freq_factor=rope.number("high_freq_factor"),
    )


_ROPE_KINDS: tuple[Literal["default", "yarn", "llama3", "linear"], ...] = ("default", "yarn", "llama3", "linear")


def _yarn(rope: ConfigReader, dim: int, theta: float, original: int, max_positions: int) -> RopeSpec:
    if not rope.flag("truncate", True):
        raise rope.error("truncate", "true")
    factor = max_positions / original if rope.has("factor") and rope.get("factor") is None else rope.number("factor")
    mscale, mscale_all_dim = rope.optional_number("mscale"), rope.optional_number("mscale_all_dim")
    attention_factor = rope.optional_number("attention_factor")
    if attention_factor is None and mscale and mscale_all_dim:
        attention_factor = yarn_mscale(factor, mscale) / yarn_mscale(factor, mscale_all_dim)
    elif attention_factor is None:
        # As transformers: `mscale` counts only together with `mscale_all_dim` (DeepSeek's own code takes it alone too).
        attention_factor = yarn_mscale(factor, 1.0)
    return RopeSpec(
        dim=dim,
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_positions=original,
        beta_fast=rope.optional_number("beta_fast") or 32.0,
        beta_slow=rope.optional_number("beta_slow") or 1.0,
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
        attention_factor=attention_factor,
    )
