"""The demo model's tokenizer: byte-level BPE, with the chat format as special tokens.

Special tokens split the text before BPE does, so a conversation may be encoded piece by piece (as training
does, to know which tokens are answers) or rendered by the chat template at once: the ids are equal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from raysonar.training.demo_conversations import Conversation

BEGIN, END, USER, ASSISTANT, SYSTEM, PAD = SPECIAL = (
    "<|begin|>",
    "<|end|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|pad|>",
)
VOCABULARY = 2048
IGNORED = -100

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'system' %}{{- '<|system|>' + message['content'] | trim }}"
    "{%- elif message['role'] == 'assistant' %}{{- '<|assistant|>' + message['content'] | trim + '<|end|>' }}"
    "{%- else %}{{- '<|user|>' + message['content'] | trim }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def train_tokenizer(texts: Iterable[str], vocabulary: int = VOCABULARY) -> Tokenizer:
    """A byte-level BPE of exactly `vocabulary` entries, unless the texts are too few for that many."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token that must exist."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def encode(tokenizer: Tokenizer, conversation: Conversation) -> tuple[list[int], list[int]]:
    """Token ids and labels; only answers and their end are labelled."""
    ids = [token_id(tokenizer, BEGIN)]
    labels = [IGNORED]

    def add(piece: str, special: str, labelled: bool) -> None:
        tokens = tokenizer.encode(piece, add_special_tokens=False).ids
        ids.extend([token_id(tokenizer, special), *tokens])
        labels.extend([IGNORED, *(tokens if labelled else [IGNORED] * len(tokens))])

    if conversation.system is not None:
        add(conversation.system, SYSTEM, False)
    for turn in conversation.turns:
        add(turn.question, USER, False)
        add(turn.answer, ASSISTANT, True)
        ids.append(token_id(tokenizer, END))
        labels.append(ids[-1])
    return ids, labels


def encode_prompt(tokenizer: Tokenizer, question: str) -> list[int]:
    """What the chat template makes of one user message."""
    return tokenizer.encode(f"{BEGIN}{USER}{question}{ASSISTANT}", add_special_tokens=False).ids


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int = 512) -> None:
    """The files that Hugging Face's AutoTokenizer and other engines read."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    generation = {
        "bos_token_id": token_id(tokenizer, BEGIN),
        "eos_token_id": token_id(tokenizer, END),
        "pad_token_id": token_id(tokenizer, PAD),
        "do_sample": False,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
