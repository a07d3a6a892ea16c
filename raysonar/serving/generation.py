"""What crosses between the ingress and the driver deployment: plain data only."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from raysonar.driver.outputs import Delta
from raysonar.driver.params import SamplingParams
from raysonar.driver.request import Progress
from raysonar.serving.parsers import TAIL_TOKENS, ToolFormatName, opens_reasoning
from raysonar.serving.problems import Problem


@dataclass(frozen=True)
class Chat:
    """Messages for the model's chat template, each {"role": ..., "content": ...}; see ChatTemplate.render."""

    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the template reads."""


Prompt = str | list[int] | Chat
Thinking = Literal["never", "at once", "as prompted"]
"""Whether the answer begins inside of reasoning. As prompted: when the prompt ends there."""


@dataclass(frozen=True)
class Reader:
    """Where an ingress takes batches; see `feed`."""

    host: str
    port: int
    secret: bytes = field(repr=False)


@dataclass(frozen=True)
class Generation:
    """One HTTP request: every prompt is sampled with the same parameters."""

    request_id: str
    prompts: list[Prompt]
    params: SamplingParams
    """Their grammar is of what comes behind the reasoning."""
    priority: int = 0
    """Lower values are served first."""
    whole: bool = False
    """All deltas may come in one batch at the end: nobody reads them earlier."""
    thinking: Thinking = "never"
    reader: Reader | None = None
    """Where to send the batches; None: to whoever iterates over them. The generation is stopped when it is gone."""
    progress: Mapping[int, Progress] = field(default_factory=dict)
    """How far prompts had come with a driver that is gone, by their place; their prompts are token ids."""

    @property
    def finished(self) -> set[int]:
        """Places of the prompts whose answers have all ended."""
        return {place for place, each in self.progress.items() if len(each.finished) == len(each.tokens)}


@dataclass(frozen=True)
class Profile:
    """What the ingress has to know of the model."""

    max_model_len: int
    has_chat_template: bool
    knows_tools: bool
    """Whether the chat template writes tools."""
    tool_format: ToolFormatName | None
    """In which the chat template writes calls."""
    reasons: bool
    """Whether the chat template is that of a model that thinks before it answers."""
    special: frozenset[str]
    """Tokens that are left out of texts unless they are asked for."""


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


Deltas = list[tuple[int, Delta]]
"""That were ready together, each with its prompt's place in the request."""
Batch = Deltas | Problem
"""A Problem ends the stream."""


def begins_thinking(thinking: Thinking, prompt: list[int], bytes_of: Callable[[int], bytes]) -> bool:
    """Whether the answer to these tokens begins inside of reasoning; `bytes_of` a token."""
    if thinking != "as prompted":
        return thinking == "at once"
    return opens_reasoning(b"".join(map(bytes_of, prompt[-TAIL_TOKENS:])).decode("utf-8", "replace"))
