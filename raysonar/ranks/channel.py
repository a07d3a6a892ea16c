"""The channel between the driver and the ranks: plans one way, results the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from raysonar.observe.chrome import RankTimeline


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
    """Of one rank."""
    experts_travel: bool
    """Whether tokens travel between ranks to their experts, so that there is something for two halves to hide."""
    processes: tuple[tuple[str, int], ...]
    """(host name, process id) of each rank."""


class StepChannel(Protocol):
    """Steps are worked on in the order they were sent; each has one result of each data-parallel row."""

    def send(self, plans: Sequence[bytes]) -> None:
        """Queue a step: a packed StepPlan for each data-parallel row; does not wait for the ranks to work on it."""

    def receive(self, timeout: float) -> list[bytes]:
        """The oldest outstanding step's packed StepResults, one of each data-parallel row.

        Raises TimeoutError after `timeout` seconds, EngineFailedError when a rank has failed or the channel is closed.
        """

    def check(self) -> None:
        """Raises EngineFailedError when a rank is known to have failed; does not wait."""

    def restart(self) -> RankInfo:
        """Start the ranks anew, as they were at first; plans that are outstanding are dropped.

        Whatever the ranks were at is ended. Raises what the first start may raise.
        """

    def timelines(self, timeout: float) -> list[RankTimeline]:
        """What each rank has recorded of traced steps since this was last asked; may be called from any thread.

        Raises EngineFailedError when a rank has failed or has not answered within `timeout` seconds.
        """

    def close(self) -> None:
        """End the ranks' work; may be called again."""
