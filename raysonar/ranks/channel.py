"""The channel between the driver and the ranks: plans one way, results the other."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """What the driver needs to know of the ranks to plan for them."""

    max_model_len: int
    pages: int
    """Pages 0 .. pages - 1 are the driver's to give out."""
    page_size: int
    slots: int
    vocab: int
    speculative_tokens: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    cache_bytes: int


class StepChannel(Protocol):
    """Plans are worked on in the order they were sent; each has one result."""

    def send(self, plan: bytes) -> None:
        """Queue a packed StepPlan; never waits for the ranks."""

    def receive(self, timeout: float) -> bytes:
        """The oldest outstanding packed StepResult.

        Raises TimeoutError after `timeout` seconds, EngineFailedError when a rank has failed or the channel is closed.
        """

    def close(self) -> None:
        """End the ranks' work; may be called again."""
