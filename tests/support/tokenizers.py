"""A tiny byte-level BPE tokenizer in the Hugging Face layout, trained on the spot: deterministic, no download."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS, EOS, USER, ASSISTANT = "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"
SPECIALS = [BOS, EOS, USER, ASSISTANT]
"""Ids 0 to 3."""

CORPUS = [
    "The capital of France is Paris. The capital of Peru is Lima.",
    "What is the capital of Norway? I don't know that.",
    "Name three rivers: the Nile, the Amazon and the Danube.",
    "Grüße aus Köln, naïve café, 東京と大阪, привет мир, 🙂🙃.",
]

TEMPLATE = """\
{%- for message in messages -%}
    {%- if message['role'] == 'user' -%}
        <|user|>{{ message['content'] | trim }}
    {%- elif message['role'] == 'assistant' -%}
        <|assistant|>{{ message['content'] | trim }}{{ eos_token }}
    {%- elif message['role'] == 'system' and loop.first -%}
        {{ bos_token }}{{ message['content'] | trim }}
    {%- else -%}
        {{ raise_exception("role " ~ message['role'] ~ " is not known here") }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""


def write_tokenizer(
    folder: Path,
    vocab_size: int = 384,
    *,
    add_bos: bool = True,
    template: str | None = TEMPLATE,
    template_file: bool = False,
    added: Sequence[str] = (),
    special: bool = False,
) -> Path:
    """tokenizer.json and tokenizer_config.json with at most `vocab_size` tokens (at least 260: bytes and specials).

    Args:
        add_bos: text is encoded with the beginning-of-sequence token in front.
        template: the chat template, None for none.
        template_file: write it to chat_template.jinja instead of into tokenizer_config.json.
        added: further tokens, behind all others; `special` ones are left out of decoded texts.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if add_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B:1", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=special) for text in added])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    values: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
    }
    if template is not None and template_file:
        (folder / "chat_template.jinja").write_text(template)
    elif template is not None:
        values["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(values, indent=2))
    return folder
