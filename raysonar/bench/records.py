"""What was seen of each request."""

from dataclasses import dataclass, field


@dataclass
class Record:
    """One request. Times are in seconds, from when it was due."""

    due: float
    """From the beginning of the measurement."""
    first: float | None = None
    """When its first text came; None when it was not streamed, or none came."""
    gaps: list[float] = field(default_factory=list)
    """Between pieces of text that came one after the other."""
    seconds: float = 0.0
    """Until its end."""
    prompt_tokens: int = 0
    tokens: int = 0
    """Generated; by the server's own count, or else the pieces that came."""
    drafted: int = 0
    accepted: int = 0
    error: str | None = None

    @property
    def per_token(self) -> float | None:
        """The mean time of a token after the first; None for fewer than two."""
        if self.first is None or self.tokens < 2:
            return None
        return (self.seconds - self.first) / (self.tokens - 1)

    def see(self, now: float) -> None:
        """Text came, `now` seconds after it was due."""
        if self.first is None:
            self.first = now
        else:
            self.gaps.append(now - self.seconds)
        self.seconds = now

    def count(self, usage: dict[str, object]) -> None:
        """Take over OpenAI's usage object."""

        def number(values: object, name: str) -> int:
            value = values.get(name) if isinstance(values, dict) else None
            return value if isinstance(value, int) else 0

        self.prompt_tokens = number(usage, "prompt_tokens")
        self.tokens = number(usage, "completion_tokens") or self.tokens
        details = usage.get("completion_tokens_details")
        self.accepted = number(details, "accepted_prediction_tokens")
        self.drafted = self.accepted + number(details, "rejected_prediction_tokens")
