"""What crosses between the ingress and the driver deployment: plain data only."""

from dataclasses import dataclass

from raysonar.driver.outputs import Delta
from raysonar.driver.params import SamplingParams
from raysonar.serving.problems import Problem


@dataclass(frozen=True)
class Chat:
    """Messages for the model's chat template, each {"role": ..., "content": ...}."""

    messages: tuple[dict[str, str], ...]


Prompt = str | list[int] | Chat


@dataclass(frozen=True)
class Generation:
    """One HTTP request: every prompt is sampled with the same parameters."""

    request_id: str
    prompts: list[Prompt]
    params: SamplingParams
    whole: bool = False
    """All deltas may come in one batch at the end: nobody reads them earlier."""


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of every token."""

    tokens: list[bytes]

    def text(self, token_id: int) -> str:
        """The token alone; bytes that are no whole characters become U+FFFD."""
        return self.tokens[token_id].decode("utf-8", "replace")

    def decode(self, token_ids: list[int]) -> str:
        """Special tokens are spelt out."""
        return b"".join(self.tokens[token_id] for token_id in token_ids).decode("utf-8", "replace")


Batch = list[tuple[int, Delta]] | Problem
"""Deltas that were ready together, each with its prompt's place in the request; a Problem ends the stream."""
