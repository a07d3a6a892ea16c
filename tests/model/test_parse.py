"""config.json to ModelSpec: the published models' numbers, both styles of file, and what is refused by name."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from support.checkpoints import DEEPSEEK, LLAMA, make_deepseek_v2, make_deepseek_v3, make_llama
from transformers import DeepseekV2Config, DeepseekV3Config, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v2.modeling_deepseek_v2 import yarn_apply_mscale

from raysonar.errors import ModelFolderError
from raysonar.model.folder import open_folder
from raysonar.model.parse import ConfigReader, parse_spec
from raysonar.model.spec import MlaSpec, MoeSpec, RopeSpec

YARN_OLD = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 4096,
}
DEEPSEEK_V3 = {  # as published, the keys that describe the model
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": YARN_OLD,
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
DEEPSEEK_V2_LITE = DEEPSEEK_V3 | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "first_k_dense_replace": 1,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "rope_scaling": YARN_OLD | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "topk_group": 1,
    "topk_method": "greedy",
    "vocab_size": 102400,
}
LLAMA_32_1B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}


def parse(values):
    return parse_spec(ConfigReader(values, Path("model/config.json")))


def without(values, *keys):
    return {key: value for key, value in values.items() if key not in keys}


def test_deepseek_v3_as_published():
    spec = parse(DEEPSEEK_V3)
    assert (spec.vocab, spec.hidden, spec.layers, spec.intermediate) == (129280, 7168, 61, 18432)
    assert (spec.first_dense, spec.moe_every, spec.mtp_modules, spec.mtp_hidden) == (3, 1, 1, "pre_norm")
    assert (spec.max_positions, spec.eps, spec.tied_embeddings) == (163840, 1e-6, False)
    assert replace(spec.mla, softmax_scale=0.0) == MlaSpec(
        heads=128, q_lora_rank=1536, kv_lora_rank=512, nope_dim=128, rope_dim=64, v_dim=128, softmax_scale=0.0
    )
    assert spec.mla.softmax_scale == pytest.approx(0.13523, abs=1e-5)
    assert spec.moe == MoeSpec(
        experts=256,
        top_k=8,
        intermediate=2048,
        shared_experts=1,
        scoring="sigmoid",
        selection="noaux_tc",
        groups=8,
        top_groups=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    )
    assert spec.rope == RopeSpec(
        dim=64,
        theta=10000.0,
        kind="yarn",
        factor=40.0,
        original_max_positions=4096,
        mscale=1.0,
        mscale_all_dim=1.0,
        attention_factor=1.0,
    )


def test_deepseek_v2_lite_as_published():
    spec = parse(DEEPSEEK_V2_LITE)
    assert (spec.vocab, spec.hidden, spec.layers, spec.intermediate) == (102400, 2048, 27, 10944)
    assert (spec.first_dense, spec.mtp_modules, spec.mla.q_lora_rank) == (1, 0, None)
    assert spec.mla.softmax_scale == pytest.approx(0.11472, abs=1e-5)
    assert spec.moe == MoeSpec(
        experts=64, top_k=6, intermediate=1408, shared_experts=2, scoring="softmax", selection="greedy"
    )
    assert spec.rope.attention_factor == 1.0


def test_llama_as_published():
    spec = parse(LLAMA_32_1B)
    assert (spec.heads, spec.kv_heads, spec.head_dim, spec.layers) == (32, 8, 64, 16)
    assert (spec.eps, spec.tied_embeddings, spec.max_positions) == (1e-5, True, 131072)
    assert spec.rope == RopeSpec(
        dim=64, theta=500000.0, kind="llama3", factor=32.0, original_max_positions=8192, high_freq_factor=4.0
    )


@pytest.mark.parametrize("published", [DEEPSEEK_V3, DEEPSEEK_V2_LITE, LLAMA_32_1B])
def test_the_styles_of_transformers_4_and_5_say_the_same(published):
    rope = dict(published["rope_scaling"])
    kind = rope.pop("type", None) or rope.pop("rope_type")
    new = without(published, "rope_scaling", "rope_theta", "torch_dtype") | {
        "rope_parameters": {"rope_type": kind, "rope_theta": published["rope_theta"], **rope},
        "dtype": "bfloat16",
    }
    assert parse(new) == parse(published)


@pytest.mark.parametrize(
    ("make", "config_class", "keys"),
    [
        (make_deepseek_v2, DeepseekV2Config, DEEPSEEK),
        (make_deepseek_v3, DeepseekV3Config, DEEPSEEK),
        (make_llama, LlamaConfig, LLAMA),
    ],
)
def test_absent_keys_take_the_defaults_of_transformers_classes(make, config_class, keys):
    """A file with the shape-giving keys only against the same file with every key of the class written out."""
    given = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    minimal = {key: keys[key] for key in given}
    minimal |= {
        "hidden_size": 128,
        "num_attention_heads": 8,
        "architectures": [f"{config_class.__name__[:-6]}ForCausalLM"],
    }
    if config_class is DeepseekV2Config:
        minimal["num_experts_per_tok"] = 2  # the class has no default that works
    full = config_class(**without(minimal, "architectures")).to_dict() | {"architectures": minimal["architectures"]}
    assert parse(minimal) == parse(full)
    assert len(full) > len(minimal) + 10


def test_the_type_alone_names_the_architecture():
    assert parse(without(DEEPSEEK_V3, "architectures")) == parse(DEEPSEEK_V3)


def test_another_type_with_a_known_architecture_is_that_architecture():
    """Kimi K2 declares DeepseekV3ForCausalLM under a type of its own."""
    assert parse(DEEPSEEK_V3 | {"model_type": "kimi_k2"}) == parse(DEEPSEEK_V3)


def test_a_model_without_routed_experts_is_dense():
    assert parse(DEEPSEEK_V3 | {"n_routed_experts": None}).moe is None


def test_the_modules_hidden_state_is_an_option_of_the_file():
    assert parse(DEEPSEEK_V3 | {"mtp_hidden": "post_norm"}).mtp_hidden == "post_norm"


YARNS = [
    {"mscale": 1.0, "mscale_all_dim": 1.0},
    {"mscale": 0.707, "mscale_all_dim": 0.707},
    {"mscale": 0.5, "mscale_all_dim": 1.0},
    {"mscale": 0.5},
    {"mscale_all_dim": 0.8},
    {"mscale": 1.0, "mscale_all_dim": 0},
    {},
    {"attention_factor": 1.3},
    {"factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
    {"factor": None},
]


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("extra", YARNS, ids=lambda extra: ",".join(extra) or "plain")
def test_yarns_scales_equal_transformers(version, extra):
    rope = without(YARN_OLD, "type", "mscale", "mscale_all_dim")
    rope |= {"rope_type": "yarn", "rope_theta": 10000.0, **extra}
    published = DEEPSEEK_V2_LITE if version == 2 else DEEPSEEK_V3
    values = without(published, "rope_scaling", "rope_theta") | {"rope_parameters": rope}
    config_class = DeepseekV2Config if version == 2 else DeepseekV3Config
    theirs = config_class(**without(values, "quantization_config"))
    spec = parse(values)
    if rope["factor"] is not None:
        assert spec.mla.softmax_scale == pytest.approx(yarn_apply_mscale(theirs.rope_parameters, 192**-0.5))
    _, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](theirs)
    assert spec.rope.attention_factor == pytest.approx(attention_factor)
    assert spec.rope.factor == 40.0 or rope["factor"] == 1.0


def test_v2s_norm_topk_prob_has_no_effect_as_in_transformers_and_is_said(caplog):
    """DeepSeek's own code normalises there (and then leaves out the scaling factor); no published V2 sets it."""
    assert parse(DEEPSEEK_V2_LITE | {"norm_topk_prob": True}) == parse(DEEPSEEK_V2_LITE)
    assert "norm_topk_prob is true, which has no effect on DeepSeek-V2" in caplog.text


REFUSED = [
    ({"architectures": ["DeepseekV32ForCausalLM"]}, "architectures: expected one of DeepseekV2ForCausalLM"),
    ({"architectures": ["DeepseekV4ForCausalLM"]}, r"architectures: expected .* found \['DeepseekV4ForCausalLM'\]"),
    (
        {"architectures": None, "model_type": "qwen3"},
        "model_type: expected deepseek_v2 or deepseek_v3 or llama, found 'q",
    ),
    ({"index_topk": 2048}, "index_topk: expected no such key .*V3.2"),
    ({"attention_bias": True}, "attention_bias: expected false"),
    ({"hidden_act": "gelu"}, "hidden_act: expected silu, found 'gelu'"),
    ({"hidden_size": None}, "hidden_size: expected an integer of at least 1, found None"),
    ({"num_hidden_layers": "61"}, "num_hidden_layers: expected an integer of at least 1, found '61'"),
    ({"num_attention_heads": 0}, "num_attention_heads: expected an integer of at least 1, found 0"),
    ({"vocab_size": True}, "vocab_size: expected an integer"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps: expected a number above 0"),
    ({"scoring_func": "softmax"}, "scoring_func: expected sigmoid, found 'softmax'"),
    ({"topk_method": "greedy"}, "topk_method: expected noaux_tc, found 'greedy'"),
    ({"n_group": 7}, "n_group: expected a divisor of n_routed_experts, 256, found 7"),
    ({"n_group": 256}, "n_group: expected groups of at least 2"),
    ({"topk_group": 9}, "topk_group: expected at most n_group, 8, found 9"),
    ({"topk_group": 1, "num_experts_per_tok": 33}, "num_experts_per_tok: expected at most the 32 experts of 1 groups"),
    ({"norm_topk_prob": "yes"}, "norm_topk_prob: expected true or false, found 'yes'"),
    ({"qk_rope_head_dim": 63}, "qk_rope_head_dim: expected an even number, found 63"),
    ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.type: expected default or yarn or llama3 or linear"),
    ({"rope_scaling": {"type": "yarn"}}, "rope_scaling.factor: expected a number above 0, found no such key"),
    ({"rope_scaling": {"type": "llama3", "factor": 8}}, "rope_scaling.low_freq_factor: .* found no such key"),
    ({"rope_scaling": YARN_OLD | {"truncate": False}}, "rope_scaling.truncate: expected true, found False"),
    ({"rope_scaling": 40}, "rope_scaling: expected a JSON object, found 40"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1"),
    ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers: expected an integer of at least 0"),
    ({"mtp_hidden": "middle"}, "mtp_hidden: expected pre_norm or post_norm, found 'middle'"),
]


@pytest.mark.parametrize(("change", "says"), REFUSED, ids=lambda case: ",".join(case) if isinstance(case, dict) else "")
def test_what_cannot_be_run_is_refused_by_name(change, says):
    with pytest.raises(ModelFolderError, match=f"model/config.json: {says}"):
        parse(DEEPSEEK_V3 | change)


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"])
@pytest.mark.parametrize("published", [DEEPSEEK_V3, DEEPSEEK_V2_LITE, LLAMA_32_1B])
def test_a_missing_key_is_named(key, published):
    with pytest.raises(ModelFolderError, match=f"model/config.json: {key}: expected .* found no such key"):
        parse(without(published, key))


def test_v2_refuses_other_routers_and_lacks_no_group():
    with pytest.raises(
        ModelFolderError, match="topk_method: expected greedy or group_limited_greedy, found 'noaux_tc'"
    ):
        parse(DEEPSEEK_V2_LITE | {"topk_method": "noaux_tc"})
    with pytest.raises(ModelFolderError, match="n_group: expected an integer of at least 1, found None"):
        parse(DEEPSEEK_V2_LITE | {"topk_method": "group_limited_greedy", "n_group": None})


def test_llama_refuses_biases_and_heads_that_do_not_divide():
    with pytest.raises(ModelFolderError, match="mlp_bias: expected false"):
        parse(LLAMA_32_1B | {"mlp_bias": True})
    with pytest.raises(
        ModelFolderError, match="num_key_value_heads: expected a divisor of num_attention_heads, 32, found 5"
    ):
        parse(LLAMA_32_1B | {"num_key_value_heads": 5})


def test_made_folders_parse_alike_in_both_styles(tmp_path):
    for make in (make_deepseek_v3, make_deepseek_v2, make_llama):
        new = open_folder(make(tmp_path / f"{make.__name__}_new"))
        old = open_folder(make(tmp_path / f"{make.__name__}_old", old_config=True))
        assert "rope_theta" in json.loads((old.path / "config.json").read_text())
        assert (new.spec, new.checkpoint_dtype) == (old.spec, old.checkpoint_dtype)
