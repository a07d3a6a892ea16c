"""What answers took: the moments of each one, and the totals of all."""

import time
from collections import Counter
from dataclasses import dataclass, field

from raysonar.observe.histogram import Histogram

_REQUEST_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
"""Seconds of a whole request: from a small model's on an idle machine to a long answer's under load."""
_FIRST_TOKEN_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0, 80.0)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 5.0)
_TOKENS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5)


@dataclass(slots=True)
class Moments:
    """Of one answer. Monotonic seconds, but for `arrived_at`."""

    arrived_at: float = field(default_factory=time.time)
    """Seconds since 1970."""
    arrived: float = field(default_factory=time.monotonic)
    admitted: float | None = None
    """When it got a slot for the first time."""
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    tokens: int = 0
    """Given out."""

    def admit(self) -> None:
        """It has a slot now, for the first time or again."""
        if self.admitted is None:
            self.admitted = time.monotonic()

    @property
    def queue_seconds(self) -> float | None:
        """From its arrival to its first slot."""
        return None if self.admitted is None else self.admitted - self.arrived

    @property
    def first_token_seconds(self) -> float | None:
        """From its arrival to its first token."""
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def seconds(self) -> float | None:
        """From its arrival to its end."""
        return None if self.finished is None else self.finished - self.arrived


class AnswerTotals:
    """Of all answers since the engine started. Times are in seconds; latencies are of answers that were not aborted."""

    def __init__(self) -> None:
        self.finished: Counter[str] = Counter()
        """By finish_reason."""
        self.queue = Histogram(_REQUEST_S)
        self.prefill = Histogram(_REQUEST_S)
        """From the first slot to the first token."""
        self.decode = Histogram(_REQUEST_S)
        """From the first token to the last."""
        self.whole = Histogram(_REQUEST_S)
        self.first_token = Histogram(_FIRST_TOKEN_S)
        self.between_tokens = Histogram(_TOKEN_S)
        """One entry a token after the first: those that a step brought share the time since the step before."""
        self.per_token = Histogram(_TOKEN_S)
        """One entry an answer of two tokens or more: its decode time over its tokens after the first."""
        self.prompt_tokens = Histogram(_TOKENS)
        self.generated_tokens = Histogram(_TOKENS)

    def gave_out(self, moments: Moments, tokens: int) -> None:
        """An answer's next tokens are out."""
        if not tokens:
            return
        now = time.monotonic()
        if moments.last_token is None:
            moments.first_token = now
            self._started(moments, now)
        else:
            self.between_tokens.observe((now - moments.last_token) / tokens, tokens)
        moments.last_token = now
        moments.tokens += tokens

    def _started(self, moments: Moments, now: float) -> None:
        self.first_token.observe(now - moments.arrived)
        if moments.admitted is not None:
            self.queue.observe(moments.admitted - moments.arrived)
            self.prefill.observe(now - moments.admitted)

    def finish(self, moments: Moments, reason: str, prompt_tokens: int) -> None:
        """An answer has ended, for a finish_reason."""
        moments.finished = time.monotonic()
        self.finished[reason] += 1
        if reason == "abort":
            return
        self.whole.observe(moments.finished - moments.arrived)
        self.prompt_tokens.observe(prompt_tokens)
        self.generated_tokens.observe(moments.tokens)
        if moments.first_token is not None and moments.last_token is not None:
            decode = moments.last_token - moments.first_token
            self.decode.observe(decode)
            if moments.tokens > 1:
                self.per_token.observe(decode / (moments.tokens - 1))

    def copy(self) -> "AnswerTotals":
        """As they are now."""
        copy = AnswerTotals()
        for name, value in vars(self).items():
            setattr(copy, name, value.copy())
        return copy
