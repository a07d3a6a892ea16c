"""Random checkpoints in the Hugging Face hub layout, made by transformers' own classes: tiny, seeded, deterministic.

make_deepseek_v3(tmp_path / "model", mtp=1)            # 3 layers, MoE, YaRN, one MTP module, fp32, with a tokenizer
make_deepseek_v3(tmp_path / "model", fp8="float32")    # 128x128-block e4m3 weights with fp32 scales
make_deepseek_v2(tmp_path / "model", q_lora_rank=None) # any key of the configuration class
reference_model(tmp_path / "model")                    # the same weights in transformers' class, fp32
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from support.tokenizers import write_tokenizer
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.utils import logging as transformers_logging

VOCAB = 384
BLOCK = 128
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}
DEEPSEEK: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rope_parameters": YARN,
}
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
Scales = Literal["float32", "ue8m0"]
Tensors = dict[str, torch.Tensor]


def make_deepseek_v3(folder: Path, *, mtp: int = 0, **options: Any) -> Path:
    """A DeepSeek-V3 folder with `mtp` MTP modules. `options`: those of `write_checkpoint`, and configuration keys."""
    writing, overrides = _split_options(options)
    config = DeepseekV3Config(**{**DEEPSEEK, "num_nextn_predict_layers": mtp, **overrides})
    seed = writing.get("seed", 0)
    tensors = random_tensors(DeepseekV3ForCausalLM, config, seed)
    for module in range(mtp):
        tensors |= _mtp_tensors(config, module, tensors, seed + 1000 + module)
    return write_checkpoint(folder, config, tensors, architecture="DeepseekV3ForCausalLM", **writing)


def make_deepseek_v2(folder: Path, **options: Any) -> Path:
    """A DeepSeek-V2 folder: softmax router, `topk_method` greedy unless given."""
    writing, overrides = _split_options(options)
    defaults = {**DEEPSEEK, "n_shared_experts": 2, "topk_method": "greedy", "norm_topk_prob": False}
    config = DeepseekV2Config(**{**defaults, **overrides})
    tensors = random_tensors(DeepseekV2ForCausalLM, config, writing.get("seed", 0))
    return write_checkpoint(folder, config, tensors, architecture="DeepseekV2ForCausalLM", **writing)


def make_llama(folder: Path, **options: Any) -> Path:
    """A Llama folder: grouped-query attention, plain RoPE unless given."""
    writing, overrides = _split_options(options)
    config = LlamaConfig(**{**LLAMA, **overrides})
    tensors = random_tensors(LlamaForCausalLM, config, writing.get("seed", 0))
    return write_checkpoint(folder, config, tensors, architecture="LlamaForCausalLM", **writing)


def write_checkpoint(
    folder: Path,
    config: PreTrainedConfig,
    tensors: Tensors,
    *,
    architecture: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    fp8: Scales | None = None,
    shards: int = 1,
    old_config: bool = False,
    tokenizer: bool = True,
) -> Path:
    """Writes config.json, the weights and a tokenizer.

    Args:
        dtype: of the weights; the correction bias stays fp32, as in the published files.
        fp8: quantise the linear layers to e4m3 in 128x128 blocks, with scales in this form.
        shards: files to spread the weights over; 1 writes a single model.safetensors without an index.
        old_config: config.json as transformers 4 wrote it (rope_theta, rope_scaling, torch_dtype).
        tokenizer: write one too (its ids are below the model's vocabulary).
    """
    folder.mkdir(parents=True, exist_ok=True)
    stored = {n: t.clone() if n.endswith("e_score_correction_bias") else t.to(dtype) for n, t in tensors.items()}
    if fp8 is not None:
        stored = dict(_quantised(stored, fp8))
    values = config.to_dict() | {"architectures": [architecture], "dtype": str(dtype).removeprefix("torch.")}
    if fp8 is not None:
        values["quantization_config"] = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        } | ({"scale_fmt": "ue8m0"} if fp8 == "ue8m0" else {})
    if old_config:
        values = _old_style(values)
    (folder / "config.json").write_text(json.dumps(values, indent=2))
    write_weights(folder, stored, shards)
    if tokenizer:
        write_tokenizer(folder, min(config.vocab_size, VOCAB))
    return folder


def write_weights(folder: Path, tensors: Tensors, shards: int = 1) -> None:
    """`model.safetensors`, or `shards` files with an index; tensors go round the shards in order of their names."""
    ready = {name: tensors[name].contiguous() for name in sorted(tensors)}
    if shards == 1:
        save_file(ready, folder / "model.safetensors", metadata={"format": "pt"})
        return
    size = math.ceil(len(ready) / shards)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        names = list(ready)[shard * size : (shard + 1) * size]
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        save_file({name: ready[name] for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    total = sum(tensor.nbytes for tensor in ready.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def read_weights(folder: Path) -> Tensors:
    """Every tensor of the folder as stored."""
    tensors: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name).clone() for name in opened.keys()}  # noqa: SIM118
    return tensors


def reference_model(folder: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """transformers' model with the folder's weights, eager attention, in evaluation mode."""
    transformers_logging.set_verbosity_error()  # it reports every tensor of an MTP module, which it does not load
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()


def dequantised_twin(folder: Path, target: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The fp8 folder's model with its weights multiplied out element by element: the reference for fp8 loading."""
    target.mkdir(parents=True, exist_ok=True)
    stored = read_weights(folder)
    plain: Tensors = {}
    for name, tensor in stored.items():
        if name.endswith("_scale_inv"):
            continue
        scale = stored.get(f"{name}_scale_inv")
        if scale is None:
            plain[name] = tensor
            continue
        rows, columns = tensor.shape
        per_element = scale.float()[torch.arange(rows) // BLOCK][:, torch.arange(columns) // BLOCK]
        plain[name] = (tensor.float() * per_element).to(dtype)
    write_weights(target, plain)
    values = json.loads((folder / "config.json").read_text())
    del values["quantization_config"]
    (target / "config.json").write_text(json.dumps(values, indent=2))
    write_tokenizer(target, min(values["vocab_size"], VOCAB))
    return target


def random_tensors(architecture: type[PreTrainedModel], config: PreTrainedConfig, seed: int) -> Tensors:
    """Random fp32 tensors under their public names, one per expert, scaled so that activations stay near 1."""
    with torch.device("meta"):
        model = architecture(config)
    generator = torch.Generator().manual_seed(seed)
    state = {name: tensor for name, tensor in model.state_dict().items() if not name.endswith("inv_freq")}
    values = {name: _random(name, state[name].shape, generator) for name in sorted(state)}
    if config.tie_word_embeddings:
        values["model.embed_tokens.weight"] = values.pop("lm_head.weight")
    return {public: value for name in values for public, value in _per_expert(name, values[name])}


_WRITING = {"seed", "dtype", "fp8", "shards", "old_config", "tokenizer"}


def _split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    writing = {key: value for key, value in options.items() if key in _WRITING}
    return writing, {key: value for key, value in options.items() if key not in _WRITING}


def _random(name: str, shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    values = torch.randn(shape, generator=generator)
    if name.endswith("e_score_correction_bias"):
        return 0.5 * values  # wide enough that some biased scores are negative, which tells -inf masks from 0 masks
    if len(shape) == 1:
        return 1 + 0.1 * values
    if name.endswith("embed_tokens.weight"):
        return values
    if name.endswith("gate.weight"):
        return 2 * values / math.sqrt(shape[-1])  # router logits of spread 2: clear choices
    return values / math.sqrt(shape[-1])


def _per_expert(name: str, value: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """transformers 5 stacks the experts [E, ...] and fuses gate and up; the public files hold each on its own."""
    prefix, _, last = name.rpartition(".")
    if not prefix.endswith("experts") or last not in ("gate_up_proj", "down_proj"):
        yield name, value
        return
    for expert, matrix in enumerate(value):
        if last == "down_proj":
            yield f"{prefix}.{expert}.down_proj.weight", matrix
        else:
            gate, up = matrix.chunk(2)
            yield f"{prefix}.{expert}.gate_proj.weight", gate
            yield f"{prefix}.{expert}.up_proj.weight", up


def _mtp_tensors(config: DeepseekV3Config, module: int, main: Tensors, seed: int) -> Tensors:
    """One MTP module under layer index num_hidden_layers + module; embedding and head are copies of the model's."""
    index, hidden = config.num_hidden_layers + module, config.hidden_size
    prefix = f"model.layers.{index}"
    with torch.device("meta"):
        block = DeepseekV3DecoderLayer(config, index)
    shapes = {f"{prefix}.{name}": tensor.shape for name, tensor in block.state_dict().items()}
    shapes |= {f"{prefix}.{norm}.weight": torch.Size([hidden]) for norm in ("enorm", "hnorm", "shared_head.norm")}
    shapes[f"{prefix}.eh_proj.weight"] = torch.Size([hidden, 2 * hidden])
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        public: value
        for name in sorted(shapes)
        for public, value in _per_expert(name, _random(name, shapes[name], generator))
    }
    embedding = main["model.embed_tokens.weight"]
    tensors[f"{prefix}.embed_tokens.weight"] = embedding.clone()
    tensors[f"{prefix}.shared_head.head.weight"] = main.get("lm_head.weight", embedding).clone()
    return tensors


def _quantised(tensors: Tensors, scales: Scales) -> Iterator[tuple[str, torch.Tensor]]:
    """The attention's and the MLPs' matrices in e4m3 with a scale per block; what DeepSeek leaves alone, as it is."""
    for name, tensor in tensors.items():
        linear = name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight"))
        if not linear or name.endswith("eh_proj.weight"):
            yield name, tensor
            continue
        quantised, scale = quantise_blocks(tensor, scales)
        yield name, quantised
        yield f"{name}_scale_inv", scale


def quantise_blocks(weight: torch.Tensor, scales: Scales = "float32") -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 [R, C] and the factors to multiply back, [ceil(R/128), ceil(C/128)]."""
    rows, columns = weight.shape
    high, wide = math.ceil(rows / BLOCK), math.ceil(columns / BLOCK)
    padded = torch.zeros(high * BLOCK, wide * BLOCK)
    padded[:rows, :columns] = weight.float()
    blocks = padded.view(high, BLOCK, wide, BLOCK)
    scale = blocks.abs().amax(dim=(1, 3)).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    if scales == "ue8m0":
        scale = torch.exp2(scale.log2().ceil())
    quantised = (blocks / scale[:, None, :, None]).view_as(padded)[:rows, :columns].to(torch.float8_e4m3fn)
    return quantised.contiguous(), scale.to(torch.float8_e8m0fnu) if scales == "ue8m0" else scale


def _old_style(values: dict[str, Any]) -> dict[str, Any]:
    rope = dict(values.pop("rope_parameters"))
    kind = rope.pop("rope_type", "default")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = None if kind == "default" else {"type": kind, **rope}
    values["torch_dtype"] = values.pop("dtype")
    return values
