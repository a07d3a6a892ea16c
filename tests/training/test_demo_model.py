"""The training modules compute what Hugging Face's DeepSeek-V3 and Llama compute from the exported files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from training.tiny_models import TINY, TINY_DRAFT, VOCABULARY
from transformers import AutoModelForCausalLM

from raysonar.training.demo_draft import DraftModel
from raysonar.training.demo_export import export, from_checkpoint, load, to_checkpoint
from raysonar.training.demo_model import DemoConfig, DemoModel, Gate


def random_ids(rows: int = 2, length: int = 40) -> Tensor:
    return torch.randint(6, VOCABULARY, (rows, length))


def balanced_model() -> DemoModel:
    """With biases that are not zero, as after some training."""
    model = DemoModel(TINY)
    model.train()
    for _ in range(20):
        model.losses(random_ids(), random_ids())
        model.balance(0.01)
    return model.eval()


@pytest.mark.parametrize("kind", ["target", "draft"])
def test_exported_model_gives_the_same_logits_in_transformers(kind: str, tokenizer: Tokenizer, folder: Path) -> None:
    model = balanced_model() if kind == "target" else DraftModel(TINY_DRAFT).eval()
    export(model, tokenizer, folder, "float32")
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = random_ids()
    with torch.no_grad():
        torch.testing.assert_close(model(ids), reference(ids).logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(load(folder)(ids), model(ids))


def test_export_has_the_released_layout(tokenizer: Tokenizer, folder: Path) -> None:
    export(balanced_model(), tokenizer, folder)
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV3ForCausalLM"]
    assert config["mtp_hidden"] == "pre_norm"
    mtp = f"model.layers.{config['num_hidden_layers']}"
    hidden = config["hidden_size"]
    assert tensors[f"{mtp}.eh_proj.weight"].shape == (hidden, 2 * hidden)
    assert {f"{mtp}.enorm.weight", f"{mtp}.hnorm.weight", f"{mtp}.shared_head.norm.weight"} <= set(tensors)
    assert tensors["model.layers.1.mlp.experts.7.gate_proj.weight"].shape == (config["moe_intermediate_size"], hidden)
    assert tensors["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == torch.float32
    assert tensors["model.layers.0.mlp.gate_proj.weight"].dtype == torch.bfloat16
    assert "model.layers.0.mlp.gate.weight" not in tensors


def test_checkpoint_names_are_reversible() -> None:
    model = balanced_model()
    back = from_checkpoint(to_checkpoint(model))
    assert set(back) == set(model.state_dict())
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(back[name], tensor, rtol=0, atol=0)


def test_balance_evens_the_load_and_keeps_scores_positive() -> None:
    gate = Gate(TINY)
    x = torch.randn(512, TINY.hidden_size) + 1.0

    def spread() -> float:
        gate.load.zero_()
        gate(x)
        return float(gate.load.std())

    before = spread()
    for _ in range(300):
        gate(x)
        gate.balance(0.005)
    assert spread() < before / 2
    assert float(gate.e_score_correction_bias.min()) == 0.0


def test_routing_is_limited_to_the_best_groups() -> None:
    gate = Gate(DemoConfig(hidden_size=32, topk_group=1))
    chosen, weights = gate(torch.randn(64, 32))
    group = chosen // (16 // 4)
    assert bool((group == group[:, :1]).all())
    torch.testing.assert_close(weights.sum(-1), torch.full((64,), 2.0))


def test_mtp_sees_no_future_and_feeds_on_the_next_token() -> None:
    model = balanced_model()
    ids = random_ids(1, 12)
    changed = ids.clone()
    changed[0, 8] = (changed[0, 8] + 1) % VOCABULARY
    with torch.no_grad():
        before = model.mtp_hidden(ids, model.hidden(ids))
        after = model.mtp_hidden(changed, model.hidden(changed))
    assert before.shape[1] == 11
    torch.testing.assert_close(before[:, :7], after[:, :7])  # position 6 has seen token 7 at most
    assert not torch.allclose(before[:, 7], after[:, 7])


def test_padding_on_the_right_changes_nothing() -> None:
    model = balanced_model()
    ids = random_ids(2, 20)
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[:, :12], model(ids[:, :12]), atol=1e-5, rtol=1e-4)
