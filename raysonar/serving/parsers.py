"""Finds reasoning and function calls in an answer's text as it comes, in DeepSeek's formats.

Every parser is a small state machine over pieces of text: how the text is cut into pieces does not change what comes
out, once neighbours of a kind are joined. Text that may yet become a mark is held back until that is clear. Nothing is
lost: what turns out not to be in the format comes as content, marks included.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

ToolFormatName = Literal["deepseek_v3", "deepseek_v3.1"]

THINK, THOUGHT = "<think>", "</think>"
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _CALL_END, _SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


class Part(NamedTuple):
    """A piece of one kind of text. A "call" is the name of the next function; "arguments" are of the last one named."""

    kind: Literal["content", "reasoning", "call", "arguments"]
    text: str


class Parser(Protocol):
    """Takes an answer's text piece by piece."""

    def add(self, text: str) -> list[Part]:
        """What is certain since the last call."""
        ...

    def end(self) -> list[Part]:
        """What was held back; nothing may be added after."""
        ...


@dataclass(frozen=True)
class ToolFormat:
    """How one call is written: `before_name` NAME `after_name` ARGUMENTS, then the first of `after_arguments`."""

    before_name: str
    after_name: str
    after_arguments: tuple[str, ...]
    """Where several match at one place, the longest comes first. The first is how the model was taught to write it."""
    between: str = ""
    """Two calls."""


TOOL_FORMATS: dict[ToolFormatName, ToolFormat] = {
    "deepseek_v3": ToolFormat(
        f"{_CALL}function{_SEPARATOR}", "\n```json\n", (f"\n```{_CALL_END}", f"```{_CALL_END}", _CALL_END), "\n"
    ),
    "deepseek_v3.1": ToolFormat(_CALL, _SEPARATOR, (_CALL_END,)),
}
"""DeepSeek-V3, V3-0324 and R1; DeepSeek-V3.1."""


@dataclass(frozen=True)
class AnswerFormat:
    """What is looked for in a chat's answers."""

    tools: ToolFormat | None = None
    reasons: bool = False
    spelt: bool = False
    """Whether its marks are special tokens, which have to be asked for to be seen."""
    held: bool = False
    """Whether calls are held to their format by a grammar."""

    @property
    def looks_for_something(self) -> bool:
        """Whether answers are more than content."""
        return self.tools is not None or self.reasons

    def parser(self, *, opened: bool) -> "AnswerParser":
        """For one choice. `opened`: whether the prompt ends inside of the reasoning."""
        return AnswerParser(
            ReasoningParser(opened=opened) if self.reasons else None,
            ToolParser(self.tools, held=self.held) if self.tools else None,
        )

    def marks(self) -> frozenset[str]:
        """What has to be in the text for it to be found."""
        tools = {CALLS, CALLS_END, _CALL, _CALL_END, _SEPARATOR} if self.tools else set()
        return frozenset(tools | ({THINK, THOUGHT} if self.reasons else set()))


_SPACE = " \t\r\n"
_NAME = re.compile(r"[^\s<>{}`\"]{1,128}")
"""A function's name; longer ones are not waited for."""
_QUOTE = re.compile(r'(?<!\\)(?:\\\\)*"')
"""Of a JSON string; behind an odd number of backslashes it is one of the string's characters."""


def tool_format_of(templates: Iterable[str]) -> ToolFormatName | None:
    """The format that chat templates write calls in; None when they write none."""
    source = "".join(templates)
    if CALLS not in source:
        return None
    return "deepseek_v3" if "```json" in source else "deepseek_v3.1"


def reasons(templates: Iterable[str]) -> bool:
    """Whether chat templates are of a model that thinks before it answers."""
    return any(THOUGHT in source for source in templates)


def is_thinking(text: str) -> bool:
    """Whether the beginning of an assistant's turn ends inside of its reasoning."""
    return text.rfind(THINK) > text.rfind(THOUGHT)


TAIL_TOKENS = 16
"""Of a prompt; enough to hold `<think>` and a line break, however they are split into tokens."""


def opens_reasoning(tail: str) -> bool:
    """Whether a prompt with this end has the answer begin inside of its reasoning."""
    return tail.rstrip().endswith(THINK)


class ReasoningParser:
    """What stands before `</think>` is reasoning, where the prompt opened it or the answer begins with `<think>`."""

    def __init__(self, *, opened: bool) -> None:
        """`opened`: whether the prompt ends inside the reasoning."""
        self._held = ""
        self._state: Literal["start", "reasoning", "content"] = "reasoning" if opened else "start"

    @property
    def state(self) -> Literal["start", "reasoning", "content"]:
        """Where the text has come to; "start" is before the first word."""
        return self._state

    def add(self, text: str) -> list[Part]:
        if self._state == "content":
            return _parts(Part("content", text))
        self._held += text
        if self._state == "start":
            begun = self._held.lstrip(_SPACE)
            if begun.startswith(THINK):
                self._state, self._held = "reasoning", begun.removeprefix(THINK)
            elif not THINK.startswith(begun):
                self._state = "content"
                return _parts(Part("content", self._take(len(self._held))))
            else:
                return []
        found = self._held.find(THOUGHT)
        if found < 0:
            return _parts(Part("reasoning", self._take(len(self._held) - _possible(self._held, (THOUGHT,)))))
        self._state = "content"
        reasoning = self._take(found)
        rest = self._take(len(self._held)).removeprefix(THOUGHT)
        return _parts(Part("reasoning", reasoning), Part("content", rest))

    def end(self) -> list[Part]:
        return _parts(Part("reasoning" if self._state == "reasoning" else "content", self._take(len(self._held))))

    def _take(self, size: int) -> str:
        taken, self._held = self._held[:size], self._held[size:]
        return taken


class ToolParser:
    """Function calls stand in one section at the end of the answer; what comes before and after it is content."""

    def __init__(self, form: ToolFormat, *, held: bool = False) -> None:
        """`held`: arguments are sure to be JSON, so that a mark inside of a string is no mark."""
        self._form = form
        self._json = held
        self._given = ""
        """The last call's arguments so far."""
        self._held = ""
        self._calls = 0
        self._state: Literal["content", "between", "arguments", "over"] = "content"

    def add(self, text: str) -> list[Part]:
        self._held += text
        parts: list[Part] = []
        while (news := self._advance()) is not None:
            parts += news
        return parts

    def end(self) -> list[Part]:
        held, self._held = self._held, ""
        if self._state == "between" and self._calls and not held.strip(_SPACE):
            return []  # the section was not closed, as in one of DeepSeek's own templates
        return _parts(Part("arguments" if self._state == "arguments" else "content", held))

    def _advance(self) -> list[Part] | None:
        """The next parts; None when more text is needed."""
        match self._state:
            case "content":
                return self._content()
            case "between":
                return self._between()
            case "arguments":
                return self._arguments()
            case "over":
                return self._release("content", len(self._held)) or None

    def _content(self) -> list[Part] | None:
        found = self._held.find(CALLS)
        if found < 0:
            return self._release("content", len(self._held) - _possible(self._held, (CALLS,))) or None
        self._state = "between"
        return self._release("content", found)

    def _between(self) -> list[Part] | None:
        """`_held` begins with the section's mark before the first call, and after a call behind that call's end."""
        form, skipped = self._form, 0 if self._calls else len(CALLS)
        rest = self._held[skipped:].lstrip(_SPACE)
        if rest.startswith(CALLS_END) and self._calls:
            self._held, self._state = rest.removeprefix(CALLS_END), "over"
            return []
        if form.before_name.startswith(rest) or (self._calls and CALLS_END.startswith(rest)):
            return None
        if not rest.startswith(form.before_name):
            return self._malformed()
        return self._name(rest.removeprefix(form.before_name))

    def _name(self, rest: str) -> list[Part] | None:
        name, mark, begun = rest.partition(self._form.after_name)
        if mark and _NAME.fullmatch(name):
            self._held, self._state, self._given = begun, "arguments", ""
            self._calls += 1
            return [Part("call", name)]
        sure = rest[: len(rest) - _possible(rest, (self._form.after_name,))]
        if mark or (sure and not _NAME.fullmatch(sure)):
            return self._malformed()
        return None

    def _arguments(self) -> list[Part] | None:
        ends = self._form.after_arguments
        found = [(at, -len(end), end) for end in ends if (at := self._held.find(end)) >= 0]
        if not found:
            return self._release("arguments", len(self._held) - _possible(self._held, ends)) or None
        at, _, end = min(found)
        if self._json and _in_string(self._given + self._held[:at]):
            return self._release("arguments", at + len(end))
        arguments = self._held[:at]
        self._held, self._state = self._held[at + len(end) :], "between"
        return _parts(Part("arguments", arguments))

    def _malformed(self) -> list[Part]:
        self._state = "over"
        return self._release("content", len(self._held))

    def _release(self, kind: Literal["content", "arguments"], size: int) -> list[Part]:
        text, self._held = self._held[:size], self._held[size:]
        if self._json and kind == "arguments":
            self._given += text
        return _parts(Part(kind, text))


class AnswerParser:
    """Reasoning first, then function calls in what is left; without either, all is content."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolParser | None) -> None:
        self._stages: list[Parser] = [stage for stage in (reasoning, tools) if stage is not None]

    def add(self, text: str) -> list[Part]:
        parts = _parts(Part("content", text))
        for stage in self._stages:
            parts = _through(stage, parts)
        return parts

    def end(self) -> list[Part]:
        parts: list[Part] = []
        for stage in self._stages:
            parts = _through(stage, parts) + stage.end()
        return parts


class ReasoningTokens:
    """Counts an answer's tokens up to the end of its reasoning, the marks' own included."""

    def __init__(self, *, opened: bool) -> None:
        """`opened`: whether the prompt ends inside the reasoning."""
        self._parser = ReasoningParser(opened=opened)
        self._before = 0
        """Tokens of which it is not known yet."""

    def add(self, tokens: Iterable[bytes]) -> int:
        """How many tokens more are reasoning, given the bytes of the answer's next ones."""
        count = 0
        for token in tokens:
            state = self._parser.state
            if state == "content":
                break
            self._before += 1
            self._parser.add(token.decode("latin-1"))  # the marks are ASCII, and every byte a character
            if state == "reasoning" or self._parser.state == "reasoning":
                count, self._before = count + self._before, 0
        return count


def _through(stage: Parser, parts: Sequence[Part]) -> list[Part]:
    """Parts with the stage's in the place of their content."""
    return [new for part in parts for new in (stage.add(part.text) if part.kind == "content" else [part])]


def _parts(*parts: Part) -> list[Part]:
    """Without empty ones."""
    return [part for part in parts if part.text]


def _in_string(json: str) -> bool:
    """Whether the beginning of a JSON text ends inside of a string."""
    return len(_QUOTE.findall(json)) % 2 == 1


def _possible(text: str, marks: Sequence[str]) -> int:
    """Length of the longest end of `text` that a mark begins with."""
    for size in range(min(len(text), max(map(len, marks)) - 1), 0, -1):
        if any(len(mark) > size and mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0
