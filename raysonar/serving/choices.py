"""The choices of an answer in the making: pieces as they come, and what they add up to."""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field

from raysonar.driver.outputs import Origin, TokenLogprob
from raysonar.serving.parsers import AnswerFormat, Part, ReasoningTokens


@dataclass
class Call:
    """A part of a function's call: the first one names it, the others have more of its arguments."""

    index: int
    arguments: str = ""
    name: str | None = None
    id: str | None = None

    def json(self, *, whole: bool) -> dict[str, object]:
        """OpenAI's object; without its place when it is `whole`."""
        head: dict[str, object] = {} if whole else {"index": self.index}
        if self.name is None:
            return head | {"function": {"arguments": self.arguments}}
        return head | {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


@dataclass
class Piece:
    """A part of a choice."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob | None] = field(default_factory=list)
    """One a token, when asked for; None for a prompt's first token."""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    """One a token of the answer, when asked for."""

    @property
    def says_something(self) -> bool:
        """Whether a stream has to send it."""
        return bool(self.text or self.logprobs or self.finish_reason or self.reasoning or self.calls or self.origins)

    def extend(self, later: "Piece") -> None:
        """Add the choice's next piece."""
        self.text += later.text
        self.reasoning += later.reasoning
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.origins += later.origins
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        for call in later.calls:
            if call.name is None:
                self.calls[-1].arguments += call.arguments
            else:
                self.calls.append(call)


class ChoiceReader:
    """Tells the reasoning and the calls in one choice from its content."""

    def __init__(self, form: AnswerFormat, *, opened: bool, reasoning: bool, parallel: bool) -> None:
        """`opened`: whether the prompt ends inside of the reasoning. Without `reasoning` it is left out, and without
        `parallel` all calls but the first."""
        self._parser = form.parser(opened=opened)
        self._tokens = ReasoningTokens(opened=opened) if form.reasons else None
        self._reasoning = reasoning
        self._parallel = parallel
        self._calls = 0

    def reasoning_tokens(self, tokens: list[bytes]) -> int:
        """How many more of the choice's tokens are reasoning, given its next ones."""
        return self._tokens.add(tokens) if self._tokens else 0

    def pieces(self, piece: Piece) -> Iterator[Piece]:
        """One piece for each kind of text in a piece of undivided text; the finish reason comes last, alone."""
        parts = self._parser.add(piece.text) + (self._parser.end() if piece.finish_reason else [])
        tokens, logprobs, origins = piece.token_ids, piece.logprobs, piece.origins
        for part in parts:
            if (new := self._piece(piece.index, part)) is not None:
                new.token_ids, new.logprobs, new.origins = tokens, logprobs, origins
                tokens, logprobs, origins = [], [], []
                yield new
        if tokens or piece.finish_reason:
            reason = "tool_calls" if self._calls and piece.finish_reason == "stop" else piece.finish_reason
            yield Piece(piece.index, "", tokens, logprobs, reason, piece.stop_reason, origins=origins)

    def _piece(self, index: int, part: Part) -> Piece | None:
        match part.kind:
            case "content":
                return Piece(index, part.text)
            case "reasoning":
                return Piece(index, reasoning=part.text) if self._reasoning else None
            case "call":
                self._calls += 1
                call = Call(self._calls - 1, name=part.text, id=f"call_{uuid.uuid4().hex[:24]}")
            case "arguments":
                call = Call(self._calls - 1, part.text)
        return Piece(index, calls=[call]) if self._parallel or not call.index else None
