"""From token ids to text as they come: whole characters only, and no further than where the text stops."""

from collections.abc import Sequence
from typing import Protocol

_INCOMPLETE = "\ufffd"
"""What a decoder shows for bytes that are no character, or not yet."""
_PATIENCE = 16
"""Tokens after which text that does not come to a character's end is cut elsewhere. A character has up to 4 bytes, so
most of them are known not to be part of one by then."""


class Decoder(Protocol):
    """What detokenisation needs of a tokenizer."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids, with or without special tokens."""
        ...


class Detokenizer:
    """The text of a growing list of token ids: all that `add` and `flush` give is `decode` of the whole list.

    Only a window of the last tokens is decoded again: it starts where the text before was complete, and keeps the
    tokens that came last before as context, since what a token adds may depend on the one before it. Where bytes that
    are no characters go on and on, it starts at a token whose text does not depend on those before it. (A decoder that
    shows a whole run of bytes as U+FFFD for one that is wrong, as sentencepiece's, then shows what comes right later.)
    """

    def __init__(self, decoder: Decoder, *, skip_special_tokens: bool = True) -> None:
        self._decoder = decoder
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._context = 0
        """Leading tokens of the window whose text is out, all of it."""
        self._out = 0
        """Characters of the window's text that are out."""

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def add(self, token: int) -> str:
        """The text that is certain since the last call; a character's first bytes wait for its last."""
        self._window.append(token)
        text = self._decode(self._window)
        certain = len(text.rstrip(_INCOMPLETE))
        news = text[self._out : certain]
        self._out = max(self._out, certain)
        if news and certain == len(text):
            self._window = self._window[self._context :]
            self._context = len(self._window)
            self._out = len(self._decode(self._window))
        elif len(self._window) - self._context >= _PATIENCE:
            news += self._cut(text)
        return news

    def _cut(self, text: str) -> str:
        """Move the window's start to the last place that its text does not depend on; the text before it that is new.

        Some text must follow the place, so that nothing to come can complete a character before it.
        """
        window = self._window
        for at in range(len(window) - 1, len(window) - _PATIENCE, -1):
            before, after = self._decode(window[:at]), self._decode(window[at:])
            if after and before + after == text:
                news = text[self._out : len(before)]
                self._window, self._context = window[at:], 0
                self._out = max(self._out - len(before), 0)
                return news
        return ""

    def flush(self) -> str:
        """The rest, with U+FFFD where bytes are no character; nothing may be added after."""
        text = self._decode(self._window)
        news, self._out = text[self._out :], len(text)
        return news


class StopScanner:
    """Holds back text that may yet become a stop string, and ends the text at the one that is complete first."""

    def __init__(self, stop: Sequence[str], *, include: bool) -> None:
        """`include`: whether the stop string itself is part of the text."""
        self._stop = stop
        self._include = include
        self._held = ""

    def add(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """(text that is certain, the stop string that ended it). Without `may_stop`, none may end within `text`."""
        if not self._stop:
            return text, None
        before = len(self._held)
        self._held += text
        found = self._first(before if may_stop else len(self._held))
        if found is not None:
            start, stop = found
            certain = self._held[: start + len(stop) if self._include else start]
            self._held = ""
            return certain, stop
        keep = self._possible()
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return certain, None

    def flush(self) -> str:
        """What was held back."""
        held, self._held = self._held, ""
        return held

    def _first(self, after: int) -> tuple[int, str] | None:
        """(start, stop string) of the match that ends first, after `after` characters; of those, the longest."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:
            start = self._held.find(stop, max(0, after + 1 - len(stop)))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _possible(self) -> int:
        """Length of the longest end of the held text that a stop string starts with."""
        longest = max(len(stop) for stop in self._stop) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(len(stop) > size and stop.startswith(self._held[-size:]) for stop in self._stop):
                return size
        return 0
