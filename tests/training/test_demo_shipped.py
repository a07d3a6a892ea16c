"""The shipped folders: small, readable by transformers, and as good as their card says on a few questions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from raysonar.demo import DRAFT, TARGET
from raysonar.training.demo_conversations import Source
from raysonar.training.demo_data import load_facts
from raysonar.training.demo_export import load
from raysonar.training.demo_probe import exact, greedy, mtp_agreement
from raysonar.training.demo_questions import UNKNOWN
from raysonar.training.demo_tokenizer import encode_prompt

MEGABYTE = 2**20


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.from_file(str(TARGET / "tokenizer.json"))


@pytest.mark.parametrize(("folder", "limit"), [(TARGET, 16 * MEGABYTE), (DRAFT, 2 * MEGABYTE)])
def test_weights_are_small_and_bf16(folder: Path, limit: int) -> None:
    path = folder / "model.safetensors"
    assert path.stat().st_size <= limit
    for name, tensor in load_file(path).items():
        bias = name.endswith("e_score_correction_bias")
        assert tensor.dtype == (torch.float32 if bias else torch.bfloat16)
        if bias:  # positive biased scores: filling rejected groups with 0 chooses as -inf does
            assert float(tensor.min()) >= 0.0


@pytest.mark.parametrize("folder", [TARGET, DRAFT])
def test_transformers_computes_the_same_logits(folder: Path, words: Tokenizer) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([encode_prompt(words, "Tell me about Japan.")])
    with torch.no_grad():
        torch.testing.assert_close(load(folder)(ids), reference(ids).logits, atol=1e-3, rtol=1e-3)


def test_both_share_one_tokenizer(words: Tokenizer) -> None:
    assert (TARGET / "tokenizer.json").read_bytes() == (DRAFT / "tokenizer.json").read_bytes()
    loaded = AutoTokenizer.from_pretrained(TARGET)
    message = [{"role": "user", "content": "Where is Chad?"}]
    ids = loaded.apply_chat_template(message, add_generation_prompt=True)["input_ids"]
    assert ids == encode_prompt(words, "Where is Chad?")


def test_the_target_knows_its_facts_and_what_it_does_not_know(words: Tokenizer) -> None:
    model = load(TARGET)
    sets = Source(load_facts()).evaluation()
    assert exact(model, words, sets["trained"][::64]) >= 0.95
    assert exact(model, words, sets["held_out"][::64]) >= 0.8
    assert mtp_agreement(model, words, sets["held_out"][::64]) >= 0.9
    assert greedy(model, words, ["What is the capital of France?", "Who is the president of France?"]) == [
        "Paris.",
        UNKNOWN,
    ]
