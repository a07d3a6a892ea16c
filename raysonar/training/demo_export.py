"""Between the training modules and Hugging Face folders.

The released DeepSeek-V3 layout keeps one tensor per expert, so the stacked experts are split here; loading them
back makes an exported folder usable for evaluation and for continued training.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import fields
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from raysonar.training.demo_draft import DraftConfig, DraftModel
from raysonar.training.demo_model import DemoConfig, DemoModel
from raysonar.training.demo_tokenizer import BEGIN, END, PAD, save_tokenizer, token_id

BIAS = "e_score_correction_bias"


def to_checkpoint(model: nn.Module) -> dict[str, Tensor]:
    """The state under the checkpoint's names, experts split."""
    named: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        prefix, _, last = name.rpartition(".")
        if last == "gate_up_proj":
            for expert, block in enumerate(tensor):
                gate, up = block.chunk(2)
                named[f"{prefix}.{expert}.gate_proj.weight"] = gate
                named[f"{prefix}.{expert}.up_proj.weight"] = up
        elif last == "down_proj":
            for expert, block in enumerate(tensor):
                named[f"{prefix}.{expert}.down_proj.weight"] = block
        else:
            named[name] = tensor
    return {name: tensor.detach().clone().contiguous() for name, tensor in named.items()}


def from_checkpoint(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `to_checkpoint`, in fp32."""
    state: dict[str, Tensor] = {}
    experts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in named.items():
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            prefix, expert, projection = match.groups()
            experts.setdefault(prefix, {}).setdefault(int(expert), {})[projection] = tensor.float()
        else:
            state[name] = tensor.float()
    for prefix, found in experts.items():
        rows = [found[expert] for expert in sorted(found)]
        state[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat((r["gate_proj"], r["up_proj"])) for r in rows])
        state[f"{prefix}.down_proj"] = torch.stack([r["down_proj"] for r in rows])
    return state


def export(model: DemoModel | DraftModel, tokenizer: Tokenizer, folder: Path, dtype: str = "bfloat16") -> None:
    """Write a complete Hugging Face folder; readers see either the old weights or the new ones."""
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(tokenizer, folder, model.config.max_position_embeddings)
    begin, end, pad = (token_id(tokenizer, token) for token in (BEGIN, END, PAD))
    config = {**model.config.huggingface(begin, end, pad), "torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    kept = getattr(torch, dtype)
    tensors = {
        name: tensor if name.endswith(BIAS) else tensor.to(kept) for name, tensor in to_checkpoint(model).items()
    }
    partial = folder / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    os.replace(partial, folder / "model.safetensors")


def load(folder: Path) -> DemoModel | DraftModel:
    """The model of an exported folder, in fp32 and ready to evaluate."""
    raw = json.loads((folder / "config.json").read_text())
    model: DemoModel | DraftModel
    if raw["model_type"] == "deepseek_v3":
        model = DemoModel(DemoConfig(**{f.name: raw[f.name] for f in fields(DemoConfig)}))
    else:
        model = DraftModel(DraftConfig(**{f.name: raw[f.name] for f in fields(DraftConfig)}))
    model.load_state_dict(from_checkpoint(load_file(folder / "model.safetensors")))
    return model.eval()
