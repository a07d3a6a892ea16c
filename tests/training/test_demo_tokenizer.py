"""The tokenizer's files work in transformers, and training encodes what the chat template renders."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from raysonar.training.demo_conversations import Conversation, Pair
from raysonar.training.demo_tokenizer import BEGIN, END, IGNORED, encode, encode_prompt, save_tokenizer, token_id

CHAT = Conversation((Pair("Where is Chad?", "In Africa."), Pair("And Chile?", "I don't know that.")), "Be brief.")
MESSAGES = [
    {"role": "system", "content": CHAT.system},
    {"role": "user", "content": CHAT.turns[0].question},
    {"role": "assistant", "content": CHAT.turns[0].answer},
    {"role": "user", "content": CHAT.turns[1].question},
    {"role": "assistant", "content": CHAT.turns[1].answer},
]


def test_any_text_survives(tokenizer: Tokenizer) -> None:
    for text in ("Where is Chad?", " two  spaces\n", "Zürich 東京 🙂", "+1-671"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_only_answers_are_labelled(tokenizer: Tokenizer) -> None:
    ids, labels = encode(tokenizer, CHAT)
    assert all(label in (IGNORED, token) for token, label in zip(ids, labels, strict=True))
    text = tokenizer.decode([label for label in labels if label != IGNORED], skip_special_tokens=False)
    assert text == f"In Africa.{END}I don't know that.{END}"


def test_chat_template_renders_what_training_encodes(tokenizer: Tokenizer, folder: Path) -> None:
    save_tokenizer(tokenizer, folder)
    loaded = AutoTokenizer.from_pretrained(folder)
    ids, _ = encode(tokenizer, CHAT)
    assert loaded.apply_chat_template(MESSAGES)["input_ids"] == ids
    question = loaded.apply_chat_template(MESSAGES[1:2], add_generation_prompt=True)["input_ids"]
    assert question == encode_prompt(tokenizer, "Where is Chad?")
    assert ids[0] == loaded.bos_token_id == token_id(tokenizer, BEGIN)
    assert loaded.eos_token == END
    assert loaded.model_max_length == 512


def test_a_token_that_does_not_exist_is_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(KeyError):
        token_id(tokenizer, "<|nothing|>")
