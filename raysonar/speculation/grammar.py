"""Grammars at every verified position: which tokens a slot's text may go on with, after any of its drafts.

A slot's matcher has taken in the answer as far as it is accepted. Drafts are taken in on trial, and rolled back where
the accepted tokens leave them. Every rank of a data-parallel row keeps the same matchers: they depend on accepted
tokens only, which are the same on all of them.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from raysonar.forms import Form
from raysonar.grammar import Grammar, GrammarKind
from raysonar.model.tokenizer import Tokenizer
from raysonar.step import Ints

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar, GrammarMatcher
    from xgrammar import GrammarCompiler as Compiler

_CACHE_BYTES = 256 << 20
_WORD_BITS = 32
_ORIGIN = re.compile(r"^\[[\d:]+\] \S+:\d+: ")
"""What xgrammar's errors begin with: the time and a line of its sources."""
_STRING_CHARACTERS = (r"[^\"\\\r\n]", r"[^\0-\x1f\"\\\r\n]")
_CHARACTER = r"[^\0-\x1f\"\\\ud800-\udfff]"
"""What xgrammar lets into strings of JSON, with a length and without; and what there is to be: control characters are
escaped, and halves of surrogate pairs are no characters."""
_NO_TEXT = b"\xff"
"""Begins no character: what the pieces of marks begin with, so that no text matches them."""


class GrammarCompiler:
    """Compiles grammars for one model, and keeps what it has compiled. May be used by several threads."""

    def __init__(self, load_tokenizer: Callable[[], Tokenizer], vocab: int) -> None:
        """vocab: the model's, which may be larger than the tokenizer's. Nothing is loaded before it is needed."""
        self._load_tokenizer, self._vocab = load_tokenizer, vocab

    def compile(self, grammar: Grammar) -> "CompiledGrammar":
        """Raises InvalidRequestError, naming the grammar's parameter: it does not compile, or matches nothing."""
        if importlib.util.find_spec("xgrammar") is None:
            raise grammar.refusal("structured output needs xgrammar: pip install 'raysonar[structured]'")
        if not self._tokenizer.available:
            raise grammar.refusal("structured output needs a tokenizer, and the model's folder has none")
        if not self._tokenizer.eos_token_ids:
            raise grammar.refusal("structured output needs an end-of-sequence token, and the model has none")
        from xgrammar import GrammarMatcher

        try:
            compiled = self._compile(grammar)
        except RuntimeError as error:
            raise grammar.refusal(_ORIGIN.sub("", str(error)).strip()) from error
        first = _no_masks(1, self._vocab)
        GrammarMatcher(compiled).fill_next_token_bitmask(first)
        if not first.any():
            raise grammar.refusal("there is no text that it matches")
        return compiled

    def _compile(self, grammar: Grammar) -> "CompiledGrammar":
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return self._compiler.compile_grammar(_ebnf(grammar.text))
            case GrammarKind.REGEX:
                return self._compiler.compile_regex(grammar.text)
            case GrammarKind.EBNF:
                return self._compiler.compile_grammar(grammar.text)
            case GrammarKind.STRUCTURE:
                tag = {"type": "structural_tag", "format": self._format(json.loads(grammar.text))}
                return self._compiler.compile_structural_tag(json.dumps(tag))

    def _format(self, form: Form) -> dict[str, Any]:
        """A form as xgrammar has it: marks by their tokens, schemas as grammars."""
        match form:
            case {"type": "mark", "text": text}:
                token = self._tokenizer.marks.get(text)
                return {"type": "const_string", "value": text} if token is None else {"type": "token", "token": token}
            case {"type": "json_schema", "json_schema": schema}:
                return {"type": "grammar", "grammar": _ebnf(json.dumps(schema))}
            case {"elements": parts}:
                return {**form, "elements": [self._format(part) for part in parts]}
            case {"tags": tags}:
                return {**form, "tags": [self._format(tag) for tag in tags]}
            case {"content": part}:
                return {**form, "content": self._format(part)}
            case _:
                return dict(form)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return self._load_tokenizer()

    @cached_property
    def _compiler(self) -> "Compiler":
        pieces, eos = self._tokenizer.pieces(), self._tokenizer.eos_token_ids
        for text, token in self._tokenizer.marks.items():
            pieces[token] = b"" if token in eos else _NO_TEXT + text.encode()
        return _compiler_of(tuple(pieces), self._vocab, eos)


@lru_cache(maxsize=64)
def _ebnf(schema: str) -> str:
    """One way to write each value: free whitespace lets a model indent for ever, and costs drafts."""
    from xgrammar import Grammar as Rules

    rules = str(Rules.from_json_schema(schema, any_whitespace=False))
    for characters in _STRING_CHARACTERS:
        rules = rules.replace(characters, _CHARACTER)
    return rules


@lru_cache(maxsize=2)
def _compiler_of(pieces: tuple[bytes, ...], vocab: int, eos_token_ids: tuple[int, ...]) -> "Compiler":
    """One for a vocabulary: an engine and a rank in one process share what either compiles."""
    from xgrammar import GrammarCompiler as Compiler
    from xgrammar import TokenizerInfo, VocabType

    info = TokenizerInfo(list(pieces), VocabType.RAW, vocab_size=vocab, stop_token_ids=list(eos_token_ids))
    return Compiler(info, max_threads=torch.get_num_threads(), cache_limit_bytes=_CACHE_BYTES)


@dataclass(eq=False)
class _Text:
    """One slot's answer under its grammar."""

    matcher: "GrammarMatcher"
    trial: list[int] = field(default_factory=list)
    """Drafts that the matcher has taken in beyond the accepted tokens."""
    masks: dict[int, Tensor] = field(default_factory=dict)
    """masks[i]: what may follow trial[:i], where it was asked for."""

    def take_in(self, drafts: Sequence[int]) -> bool:
        """Have the accepted tokens and exactly these drafts taken in; False when the grammar does not allow them."""
        same = _common(self.trial, drafts)
        if same < len(self.trial):
            self.matcher.rollback(len(self.trial) - same)
            del self.trial[same:]
            self.masks = {length: mask for length, mask in self.masks.items() if length <= same}
        for token in drafts[same:]:
            if self.ended or not self.matcher.accept_token(token):
                return False
            self.trial.append(token)
        return True

    def accept(self, tokens: Sequence[int]) -> None:
        """Take tokens in for good; what comes behind the text's end is nobody's."""
        if not self.take_in(tokens) and not set(tokens) & set(self.matcher.stop_token_ids) and not self.ended:
            raise RuntimeError(f"the tokens {list(tokens)} were accepted against the slot's grammar")
        self.trial, self.masks = [], {}

    @property
    def ended(self) -> bool:
        """Whether end-of-sequence is in."""
        return bool(self.matcher.is_terminated())


class GrammarTable:
    """The slots that have a grammar."""

    def __init__(self, vocab: int) -> None:
        self._vocab = vocab
        self._texts: dict[int, _Text] = {}

    def admit(self, slot: int, compiled: "CompiledGrammar", answer: Sequence[int]) -> None:
        """A slot under a grammar whose answer begins with these tokens."""
        from xgrammar import GrammarMatcher

        self._texts[slot] = text = _Text(GrammarMatcher(compiled))
        text.accept(answer)

    def forget(self, slots: Ints) -> None:
        """These slots hold something else from now on."""
        for slot in slots.tolist() if self._texts else ():
            self._texts.pop(slot, None)

    def cover(self, slots: Ints) -> bool:
        """Whether any of these slots has a grammar."""
        return bool(self._texts) and not self._texts.keys().isdisjoint(slots.tolist())

    def accept(self, slots: Ints, tokens: Sequence[Sequence[int]]) -> None:
        """The slots' answers go on with these tokens."""
        for slot, new in zip(slots.tolist(), tokens, strict=True):
            if slot in self._texts:
                self._texts[slot].accept(new)

    def prepare(self) -> None:
        """Have the masks that follow the accepted tokens ready, while a device is at work."""
        moved = [slot for slot, text in self._texts.items() if 0 not in text.masks and not text.ended]
        if moved:
            self.masks(np.array(moved, np.int32), [[]] * len(moved))

    def masks(self, slots: Ints, seen: Sequence[Sequence[int]]) -> Tensor:
        """Which tokens may follow.

        Args:
            slots: [N] slots, repeats allowed.
            seen: N lists, the drafts that each row has seen behind its slot's accepted tokens.

        Returns:
            int32 [N, ceil(V / 32)] on the CPU, a bit a token, lowest first. All bits for a slot without a grammar,
            behind the end of a text, and after drafts that the grammar does not allow: what is chosen there is void.
            Where the grammar allows nothing at all, end-of-sequence.
        """
        out = _no_masks(len(slots), self._vocab)
        texts = [self._texts.get(slot) for slot in slots.tolist()]
        # by length: a matcher stands after one prefix of the drafts at a time
        for length in sorted({len(drafts) for drafts in seen}):
            wanted: list[tuple[int, _Text]] = []
            for row, (text, drafts) in enumerate(zip(texts, seen, strict=True)):
                if text is None or len(drafts) != length or not text.take_in(drafts) or text.ended:
                    continue
                if length in text.masks:
                    out[row] = text.masks[length]
                else:
                    wanted.append((row, text))
            if wanted:
                self._fill(out, wanted)
                for row, text in wanted:
                    text.masks[length] = out[row]
        return out

    def _fill(self, out: Tensor, wanted: Sequence[tuple[int, _Text]]) -> None:
        rows = [row for row, _ in wanted]
        self._batch.batch_fill_next_token_bitmask([text.matcher for _, text in wanted], out, rows)
        for row, text in wanted:
            if not out[row].any():
                for token in text.matcher.stop_token_ids:
                    out[row, token // _WORD_BITS] |= torch.tensor(1 << token % _WORD_BITS).to(torch.int32)

    @cached_property
    def _batch(self) -> Any:
        from xgrammar import BatchGrammarMatcher

        return BatchGrammarMatcher(max_threads=torch.get_num_threads())


def allowed(masks: Tensor, vocab: int) -> Tensor:
    """Masks as booleans: int32 [N, ceil(V / 32)] to bool [N, V], on the masks' device."""
    shifts = torch.arange(_WORD_BITS, dtype=torch.int32, device=masks.device)
    return (masks[:, :, None].bitwise_right_shift(shifts) & 1).bool().flatten(1)[:, :vocab]


def _no_masks(rows: int, vocab: int) -> Tensor:
    return torch.full((rows, -(-vocab // _WORD_BITS)), -1, dtype=torch.int32)


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Leading items that two sequences share."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return min(len(one), len(other))
