"""The checkpoints: compute and communication of a layer are of the same size at some of the links.

A token's hidden state is 1 KB (256 x fp32), which takes 82 us each way at 100 Mbit/s, beside 120 us of sleep: links so
slow that two cores can carry the traffic of four hosts. Layers have 16 experts, 8 of them chosen, so nearly every token
has experts on every rank, and padding sends next to nothing in vain.
"""

from pathlib import Path

import torch
from make_checkpoint import CONFIG, Config, write_model

from raysonar.moe.payload import RowFormat

LAYERS = 12
"""And the MTP module's."""
HIDDEN = 256

TOP_K = 8

_COMMON: Config = CONFIG | {
    "vocab_size": 256,
    "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS,
    "n_routed_experts": 16,
    "num_experts_per_tok": TOP_K,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
    "routed_scaling_factor": 1.0,
}
_SLEEP: Config = _COMMON | {
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
}
_CPU: Config = _COMMON | {"moe_intermediate_size": 256}
CONFIGS = {"sleep": _SLEEP, "cpu": _CPU}


def write(folder: Path, mode: str) -> Path:
    """The model of a mode."""
    write_model(folder / mode, CONFIGS[mode], torch.float32)
    return folder / mode


def layer_bytes(tokens: int, ranks: int) -> int:
    """What a rank with so many tokens sends in a layer, to their experts and back."""
    there = RowFormat(hidden=HIDDEN, top_k=TOP_K, dtype=torch.float32, float8=False).row_bytes
    return tokens * (ranks - 1) * (there + 4 * HIDDEN)
