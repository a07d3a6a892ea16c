"""Writes a random DeepSeek-V3-shaped checkpoint in the Hugging Face layout, for benchmarks.

    python benchmarks/make_checkpoint.py runs/random-v3

Hidden 512, 8 layers (the first dense), 32 experts in 4 groups (2 chosen), top-4, one shared expert, vocabulary 8192,
MLA with 8 heads, one MTP module. 130 M parameters, seeded. Every weight matrix is normal with variance
1 / inputs, so activations keep their scale and the router spreads its tokens.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

Config = Mapping[str, object]

CONFIG: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": 64,
    "n_routed_experts": 32,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


class RandomWeights:
    """Seeded tensors by their name in the checkpoint."""

    def __init__(self, config: Config, seed: int, dtype: torch.dtype) -> None:
        self.size = {name: value for name, value in config.items() if isinstance(value, int)}
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = dtype
        self.tensors: dict[str, torch.Tensor] = {}

    def linear(self, name: str, outputs: int, inputs: int) -> None:
        weight = torch.randn(outputs, inputs, generator=self.generator) * inputs**-0.5
        self.tensors[f"{name}.weight"] = weight.to(self.dtype)

    def norm(self, name: str, size: int) -> None:
        self.tensors[f"{name}.weight"] = torch.ones(size, dtype=self.dtype)

    def mlp(self, name: str, intermediate: int) -> None:
        for part in ("gate_proj", "up_proj"):
            self.linear(f"{name}.{part}", intermediate, self.size["hidden_size"])
        self.linear(f"{name}.down_proj", self.size["hidden_size"], intermediate)

    def attention(self, name: str) -> None:
        hidden, heads, rope = self.size["hidden_size"], self.size["num_attention_heads"], self.size["qk_rope_head_dim"]
        nope, value, latent = self.size["qk_nope_head_dim"], self.size["v_head_dim"], self.size["kv_lora_rank"]
        self.linear(f"{name}.q_a_proj", self.size["q_lora_rank"], hidden)
        self.norm(f"{name}.q_a_layernorm", self.size["q_lora_rank"])
        self.linear(f"{name}.q_b_proj", heads * (nope + rope), self.size["q_lora_rank"])
        self.linear(f"{name}.kv_a_proj_with_mqa", latent + rope, hidden)
        self.norm(f"{name}.kv_a_layernorm", latent)
        self.linear(f"{name}.kv_b_proj", heads * (nope + value), latent)
        self.linear(f"{name}.o_proj", hidden, heads * value)

    def block(self, index: int) -> None:
        name = f"model.layers.{index}"
        self.norm(f"{name}.input_layernorm", self.size["hidden_size"])
        self.attention(f"{name}.self_attn")
        self.norm(f"{name}.post_attention_layernorm", self.size["hidden_size"])
        if index < self.size["first_k_dense_replace"]:
            self.mlp(f"{name}.mlp", self.size["intermediate_size"])
            return
        experts, intermediate = self.size["n_routed_experts"], self.size["moe_intermediate_size"]
        self.linear(f"{name}.mlp.gate", experts, self.size["hidden_size"])
        bias = 0.01 * torch.randn(experts, generator=self.generator)
        self.tensors[f"{name}.mlp.gate.e_score_correction_bias"] = bias
        for expert in range(experts):
            self.mlp(f"{name}.mlp.experts.{expert}", intermediate)
        self.mlp(f"{name}.mlp.shared_experts", intermediate * self.size["n_shared_experts"])

    def mtp(self, index: int) -> None:
        name, hidden = f"model.layers.{index}", self.size["hidden_size"]
        self.block(index)
        self.norm(f"{name}.enorm", hidden)
        self.norm(f"{name}.hnorm", hidden)
        self.linear(f"{name}.eh_proj", hidden, 2 * hidden)
        self.norm(f"{name}.shared_head.norm", hidden)
        self.tensors[f"{name}.embed_tokens.weight"] = self.tensors["model.embed_tokens.weight"].clone()
        self.tensors[f"{name}.shared_head.head.weight"] = self.tensors["lm_head.weight"].clone()

    def model(self) -> None:
        self.linear("model.embed_tokens", self.size["vocab_size"], self.size["hidden_size"])
        self.linear("lm_head", self.size["vocab_size"], self.size["hidden_size"])
        self.norm("model.norm", self.size["hidden_size"])
        for index in range(self.size["num_hidden_layers"]):
            self.block(index)
        for module in range(self.size["num_nextn_predict_layers"]):
            self.mtp(self.size["num_hidden_layers"] + module)


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Byte-level tokens for text, and a made-up word for every other id, so that every id can be shown."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{number}" for number in range(vocab - len(alphabet) - 2)]
    vocabulary = {token: number for number, token in enumerate(["<bos>", "<eos>", *alphabet, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(["<bos>", "<eos>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names, indent=2))


def write_model(folder: Path, config: Config, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> int:
    """Writes config.json and model.safetensors; returns the number of parameters."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = RandomWeights(config, seed, dtype)
    weights.model()
    name = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": name}, indent=2))
    save_file(weights.tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return sum(tensor.numel() for tensor in weights.tensors.values())


def write_checkpoint(folder: Path, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> int:
    """The model of this benchmark and a tokenizer; returns the number of parameters."""
    parameters = write_model(folder, CONFIG, dtype, seed)
    write_tokenizer(folder, int(str(CONFIG["vocab_size"])))
    return parameters


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write a random DeepSeek-V3-shaped checkpoint.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    parameters = write_checkpoint(options.folder, getattr(torch, options.dtype), options.seed)
    print(json.dumps({"folder": str(options.folder), "parameters": parameters, "dtype": options.dtype}))


if __name__ == "__main__":
    main()
