"""What is asked: prompts from a file, or random ones."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from raysonar.errors import ConfigurationError

_WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend"
).split()


@dataclass(frozen=True)
class Sample:
    """One request."""

    text: str
    max_tokens: int | None = None
    """None leaves it to the model."""


@dataclass(frozen=True)
class Lengths:
    """A range, both ends in it."""

    low: int
    high: int

    def draw(self, random: np.random.Generator) -> int:
        """Evenly."""
        return int(random.integers(self.low, self.high + 1))


def random_samples(words: Lengths, max_tokens: Lengths | None, seed: int) -> Iterator[Sample]:
    """Endless prompts of random words. The same seed gives the same ones."""
    random = np.random.default_rng(seed)
    while True:
        text = " ".join(random.choice(_WORDS, words.draw(random)))
        yield Sample(text, None if max_tokens is None else max_tokens.draw(random))


def samples_of_file(file: Path, max_tokens: Lengths | None, seed: int) -> Iterator[Sample]:
    """The prompts of JSON lines, or of one JSON list, in random order, again and again: objects with `prompt`, with
    `messages`, or with `conversations` as ShareGPT has them (the first turn is asked); or strings.

    Raises ConfigurationError that names the first object that is none of these.
    """
    texts = [_text(value, f"{file}, {place}") for place, value in enumerate(_values(file), 1)]
    if not texts:
        raise ConfigurationError(f"{file} has no prompt")
    return _again(texts, max_tokens, np.random.default_rng(seed))


def _again(texts: list[str], max_tokens: Lengths | None, random: np.random.Generator) -> Iterator[Sample]:
    while True:
        for place in random.permutation(len(texts)).tolist():
            yield Sample(texts[place], None if max_tokens is None else max_tokens.draw(random))


def _values(file: Path) -> list[Any]:
    try:
        text = file.read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("["):
            return list(json.loads(text))
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ConfigurationError(f"{file} is not read as JSON lines: {error}") from error


def _text(value: Any, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping):
        turns = value.get("conversations") or value.get("messages") or []
        first = turns[0] if isinstance(turns, list) and turns and isinstance(turns[0], Mapping) else {}
        text = value.get("prompt", first.get("value", first.get("content")))
        if isinstance(text, str) and text:
            return text
    raise ConfigurationError(f"{where}: expected prompt, messages, conversations or a string, got {str(value)[:100]}")
