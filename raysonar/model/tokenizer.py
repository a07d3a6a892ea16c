"""Texts to token ids and back, by the folder's tokenizer.json, its special tokens and its chat template."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tokenizers
from tokenizers import processors

from raysonar.errors import InvalidRequestError, ModelFolderError
from raysonar.model.chat import ChatTemplate, Message
from raysonar.model.folder import ModelFolder
from raysonar.model.shards import read_json

FILE, CONFIG, TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_MARGIN = 64
"""Tokens that a text's beginning may have more when it is encoded alone."""


class Tokenizer:
    """The folder's tokenizer, equal to transformers' AutoTokenizer on it (but for `add_bos_token`, see below).

    A folder without one gives a tokenizer that is not `available`: such a model takes prompts of token ids only, and
    every method that needs a vocabulary raises InvalidRequestError.

    Attributes:
        available: whether the folder holds a tokenizer.
        vocab_size: one more than its largest id; 0 without one.
        bos_token_id, eos_token_id: by tokenizer_config.json; None where it names none.
        eos_token_ids: what ends a text: the model's own list, then this tokenizer's eos_token_id.
        marks: the ids of tokens that were added to the vocabulary, special or not, by their text.
    """

    def __init__(
        self, path: Path, model: tokenizers.Tokenizer | None, config: Mapping[str, Any], model_eos: Sequence[int] = ()
    ) -> None:
        self._path = path
        self._model = model
        self.available = model is not None
        self._pieces: dict[int, str] = {}
        self._added: dict[int, str] = {}
        self._special: dict[str, str] = {}
        self._templates: dict[str, ChatTemplate] = {}
        if model is not None:
            self._pieces = {token: piece for piece, token in model.get_vocab(with_added_tokens=True).items()}
            self._added = {token: added.content for token, added in model.get_added_tokens_decoder().items()}
            self._special = {name: text for name in _SPECIAL if (text := _content(config.get(name))) is not None}
            self._templates = _templates(path, config, self._special)
            self._to_bytes = _bytes_of_pieces(model)
        self.marks = {text: token for token, text in self._added.items()}
        self.vocab_size = max(self._pieces, default=-1) + 1
        self.bos_token_id = self._special_id("bos_token")
        self.eos_token_id = self._special_id("eos_token")
        own_eos = [] if self.eos_token_id is None else [self.eos_token_id]
        self.eos_token_ids = tuple(dict.fromkeys([*model_eos, *own_eos]))
        if model is not None:
            self._set_post_processor(model, config)

    @classmethod
    def from_folder(cls, folder: ModelFolder) -> Self:
        """Raises ModelFolderError: unreadable files, or more tokens than the model's vocabulary has."""
        file = folder.path / FILE
        if not file.is_file():
            return cls(folder.path, None, {}, folder.eos_token_ids)
        try:
            model = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ModelFolderError(f"{file}: not a tokenizer that can be read: {error}") from error
        model.no_truncation()
        model.no_padding()
        config = folder.path / CONFIG
        tokenizer = cls(folder.path, model, read_json(config) if config.is_file() else {}, folder.eos_token_ids)
        if tokenizer.vocab_size > folder.spec.vocab:
            raise ModelFolderError(
                f"{file}: the tokenizer is larger than the model's vocabulary: expected at most {folder.spec.vocab} "
                f"tokens (vocab_size of config.json), found {tokenizer.vocab_size}"
            )
        return tokenizer

    def encode(self, text: str, add_special_tokens: bool = True, *, at_most: int | None = None) -> list[int]:
        """Token ids; with what the tokenizer adds around a text (most often a beginning-of-sequence token).

        A text that is far too long for `at_most` tokens is refused for its beginning, without the time that all of it
        would take. Raises InvalidRequestError.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(f"the text is not valid Unicode: {error}", "prompt") from error
        if at_most is not None and self._far_longer(text, at_most):
            raise InvalidRequestError(f"the prompt has more than the {at_most} tokens that there is room for", "prompt")
        return self._required().encode(text, add_special_tokens=add_special_tokens).ids

    def _far_longer(self, text: str, tokens: int) -> bool:
        """Whether a beginning of the text has more than twice so many tokens; what follows takes none of them away,
        but for the few at its end. False when the text is so short that all of it may as well be encoded.
        """
        size = 4 * (tokens + _MARGIN)
        while size < len(text):
            if len(self._required().encode(text[:size], add_special_tokens=False)) > 2 * tokens + _MARGIN:
                return True
            size *= 4
        return False

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of some token ids; bytes that are no UTF-8 become U+FFFD. Ids without a token are left out."""
        return self._required().decode(list(ids), skip_special_tokens=skip_special_tokens)

    def id_to_piece(self, token: int) -> str:
        """The token as the vocabulary spells it; empty for an id without a token."""
        self._required()
        return self._pieces.get(token, "")

    def token_bytes(self, token: int) -> bytes:
        """The bytes that the token stands for, which need not be whole characters; empty for an id without a token."""
        self._required()
        if token in self._added:
            return self._added[token].encode()
        return self._to_bytes(self._pieces[token]) if token in self._pieces else b""

    def pieces(self) -> list[bytes]:
        """The bytes of every id below `vocab_size`; none of marks."""
        self._required()
        return [b"" if token in self._added else self.token_bytes(token) for token in range(self.vocab_size)]

    def is_special(self, token: int) -> bool:
        """Whether `decode` leaves the token out when it skips special tokens."""
        added = self._required().get_added_tokens_decoder().get(token)
        return added is not None and added.special

    @property
    def special_tokens(self) -> frozenset[str]:
        """The tokens that `decode` leaves out when it skips special tokens."""
        if self._model is None:
            return frozenset()
        added = self._model.get_added_tokens_decoder().values()
        return frozenset(token.content for token in added if token.special)

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work."""
        return bool(self._templates)

    @property
    def knows_tools(self) -> bool:
        """Whether a chat template writes tools."""
        return "tool_use" in self._templates or any(template.knows_tools for template in self._templates.values())

    @property
    def template_sources(self) -> tuple[str, ...]:
        """The chat templates as they are written."""
        return tuple(template.source for template in self._templates.values())

    def chat_text(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as the chat template writes it; arguments and errors as ChatTemplate.render's."""
        if not self._templates:
            raise InvalidRequestError(
                f"the model {self._path.name} has no chat template (chat_template of {CONFIG}, or {TEMPLATE}): "
                "send a prompt instead of messages",
                "messages",
            )
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        return self._templates[name].render(
            messages, add_generation_prompt=add_generation_prompt, tools=tools, **variables
        )

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """The conversation's token ids; nothing is added to what the template writes. Errors: as `chat_text`."""
        return self.encode(
            self.chat_text(messages, add_generation_prompt, tools, **variables), add_special_tokens=False
        )

    def _required(self) -> tokenizers.Tokenizer:
        if self._model is None:
            raise InvalidRequestError(
                f"the model {self._path.name} has no {FILE}: send the prompt as token ids", "prompt"
            )
        return self._model

    def _special_id(self, name: str) -> int | None:
        if name not in self._special or self._model is None:
            return None
        token: int | None = self._model.token_to_id(self._special[name])
        if token is None:
            raise ModelFolderError(
                f"{self._path / CONFIG}: {name}: expected a token of {FILE}, found {self._special[name]!r}"
            )
        return token

    def _set_post_processor(self, model: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
        """Let add_bos_token and add_eos_token count where tokenizer.json adds no special tokens itself.

        DeepSeek's published folders rely on it. transformers 4 did the same; transformers 5 ignores the two keys and
        so encodes their texts without the beginning-of-sequence token that the models were trained with.
        """
        if model.num_special_tokens_to_add(False):
            return
        bos = [(self._special["bos_token"], self.bos_token_id)] if self._adds(config, "bos") else []
        eos = [(self._special["eos_token"], self.eos_token_id)] if self._adds(config, "eos") else []
        if bos or eos:
            single = " ".join([f"{text}:0" for text, _ in bos] + ["$A:0"] + [f"{text}:0" for text, _ in eos])
            model.post_processor = processors.TemplateProcessing(single=single, special_tokens=bos + eos)

    def _adds(self, config: Mapping[str, Any], which: str) -> bool:
        return bool(config.get(f"add_{which}_token")) and f"{which}_token" in self._special


def _content(token: Any) -> str | None:
    """Tokens are written as texts or as {"content": text, ...}."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _templates(path: Path, config: Mapping[str, Any], special: Mapping[str, str]) -> dict[str, ChatTemplate]:
    """chat_template.jinja, or else the key chat_template: a text, or a list of named ones."""
    file = path / TEMPLATE
    if file.is_file():
        try:
            source = file.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ModelFolderError(f"{file}: expected a text in UTF-8: {error}") from error
        return {"default": ChatTemplate(source, str(file), special)}
    found, origin = config.get("chat_template"), str(path / CONFIG)
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": ChatTemplate(found, origin, special)}
    try:
        named = {str(each["name"]): ChatTemplate(each["template"], origin, special) for each in found}
    except (TypeError, KeyError) as error:
        raise ModelFolderError(f"{origin}: chat_template: expected a text or a list of {{name, template}}") from error
    if "default" not in named:
        raise ModelFolderError(f'{origin}: chat_template: expected one named "default", found {sorted(named)}')
    return named


def _bytes_of_pieces(model: tokenizers.Tokenizer) -> Callable[[str], bytes]:
    """How a piece of this vocabulary spells bytes: by the kind of its decoder."""
    decoder = json.dumps(json.loads(model.to_str())["decoder"])
    if '"ByteLevel"' in decoder:
        return _byte_level
    if '"ByteFallback"' in decoder or '"Metaspace"' in decoder:
        return _sentencepiece
    return str.encode  # the piece is the text


def _byte_level(piece: str) -> bytes:
    """A piece with characters that stand for no byte is its own text, as in the tokenizers library."""
    if _BYTE_OF.keys() >= set(piece):
        return bytes(_BYTE_OF[character] for character in piece)
    return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    if _BYTE_PIECE.fullmatch(piece):
        return bytes.fromhex(piece[3:5])
    return piece.replace("▁", " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: a byte that prints stands for itself, the others follow from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTE_PIECE = re.compile("<0x[0-9A-Fa-f]{2}>")
_BYTE_OF = _byte_level_alphabet()
