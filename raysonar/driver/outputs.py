"""What a request gives back."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from raysonar.observe.answers import Moments

FinishReason = Literal["stop", "length", "abort"]
Origin = Literal["accepted", "recovered", "bonus", "plain"]
"""Where a token comes from: a draft that was accepted, the target's own token in the place of a rejected draft, its own
after drafts that were all accepted, or its own where nothing was drafted."""


def origins_of(tokens: int, drafts: int) -> list[Origin]:
    """Of the tokens that a step brought an answer, given how many drafts it verified."""
    last: Origin = "plain" if not drafts else "bonus" if tokens > drafts else "recovered"
    accepted: list[Origin] = ["accepted"] * (tokens - 1)
    return [*accepted, last]


@dataclass(frozen=True)
class TokenLogprob:
    """The natural log-probability of a token under the model's raw logits, and the likeliest tokens there."""

    token_id: int
    logprob: float
    top: dict[int, float] = field(default_factory=dict)
    """Likeliest first."""


@dataclass(frozen=True)
class Acceptance:
    """Draft tokens verified and accepted, by position in the draft (the first is position 0)."""

    drafted: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()

    @property
    def rates(self) -> tuple[float, ...]:
        """Of the drafts at each position, the share that was accepted (with all before it)."""
        return tuple(a / d if d else 0.0 for a, d in zip(self.accepted, self.drafted, strict=True))

    def __add__(self, other: "Acceptance") -> "Acceptance":
        def add(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
            size = max(len(a), len(b))
            return tuple(x + y for x, y in zip(a + (0,) * (size - len(a)), b + (0,) * (size - len(b)), strict=True))

        return Acceptance(add(self.drafted, other.drafted), add(self.accepted, other.accepted))


@dataclass
class Completion:
    """One of a request's n answers."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    origins: list[Origin] = field(default_factory=list)
    """One a token."""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended it, if one did (None for end of sequence)."""
    moments: Moments | None = None


@dataclass
class GenerationResult:
    """All of a request's answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    completions: list[Completion]
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """One a prompt token; None for the first, which nothing predicts."""
    acceptance: Acceptance = Acceptance()
    cached_tokens: int = 0
    """Prompt tokens that the prefix cache held."""
    first_token_seconds: float = 0.0
    seconds: float = 0.0

    def deltas(self) -> list["Delta"]:
        """The whole as the one delta of each completion; acceptance, of all of them, is on the first."""
        return [
            Delta(
                index=each.index,
                text=each.text,
                token_ids=each.token_ids,
                logprobs=each.logprobs,
                finish_reason=each.finish_reason,
                stop_reason=each.stop_reason,
                prompt_token_ids=None if each.index else self.prompt_token_ids,
                prompt_logprobs=None if each.index else self.prompt_logprobs,
                cached_tokens=0 if each.index else self.cached_tokens,
                acceptance=None if each.index else self.acceptance,
                moments=each.moments,
                origins=each.origins,
            )
            for each in self.completions
        ]

    @property
    def text(self) -> str:
        """The first completion's."""
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        """The first completion's."""
        return self.completions[0].token_ids

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """The first completion's."""
        return self.completions[0].logprobs

    @property
    def finish_reason(self) -> FinishReason | None:
        """The first completion's."""
        return self.completions[0].finish_reason


@dataclass(frozen=True)
class Delta:
    """What a stream yields: the news of one completion.

    Text never ends inside a UTF-8 character or inside what may yet become a stop string.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_token_ids: list[int] | None = None
    """On the request's first delta only, as are the next two."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    cached_tokens: int = 0
    acceptance: Acceptance | None = None
    """On a completion's last delta, as is the next one."""
    moments: Moments | None = None
    origins: list[Origin] = field(default_factory=list)
    """One a token."""
    lengths: list[int] = field(default_factory=list)
    """One a token of a stream: the characters of `text` that it let out. Text that waited for what comes after it came
    with that."""

    def by_token(self) -> "Iterator[Delta]":
        """The same news, one token at a time."""
        if len(self.token_ids) < 2:
            yield self
            return
        start, last = 0, len(self.token_ids) - 1
        for place, length in enumerate(self.lengths):
            one = slice(place, place + 1)
            part = replace(
                self,
                text=self.text[start : start + length],
                token_ids=self.token_ids[one],
                logprobs=None if self.logprobs is None else self.logprobs[one],
                origins=self.origins[one],
                lengths=[length],
            )
            if place:
                part = replace(part, prompt_token_ids=None, prompt_logprobs=None, cached_tokens=0)
            if place < last:
                part = replace(part, finish_reason=None, stop_reason=None, acceptance=None, moments=None)
            yield part
            start += length
