"""Ranks that sleep where they would compute: compute on a device of its own, which takes no time of the host's CPUs."""

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch

from raysonar.config import EngineConfig
from raysonar.model.deepseek import LatentAttention
from raysonar.model.mlp import Mlp
from raysonar.model.mtp import MtpModule
from raysonar.moe.communicator import Place
from raysonar.moe.experts import Experts
from raysonar.ranks.actor import Meeting, RankActor
from raysonar.ranks.channel import RankInfo

_PR_SET_TIMERSLACK = 29
"""Linux: how late a thread's timers may be, in ns; threads that it starts inherit it (prctl(2))."""

ATTENTION = 0.05e-3, 54e-6
"""Seconds a call, and a token. What comes before tokens travel (attention and shared experts) takes as long as what
comes before they travel back (experts): else the longer of the two would not be hidden behind the shorter. The fixed
part is small, as routing and packing add several times as much of their own."""
SHARED = 0.0, 6e-6
EXPERTS = 0.05e-3, 60e-6
"""A token here is one of the rank's own: routing is taken to be even, so that as many come as go."""


class SleepingActor(RankActor):
    """A rank whose attention, experts and projection sleep; routing, packing, the wire and sampling are real.

    What attention would add is the token's own (normed) state, and what experts return is the state times the weight,
    so the text still shows whether every token has come to its experts and back.
    """

    def __init__(self, config: EngineConfig, place: Place) -> None:
        super().__init__(config, place)
        _replace_compute(place.world)

    def start(self, meeting: Meeting) -> RankInfo:
        """As a rank does; its steps' thread inherits accurate timers."""
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
        return super().start(meeting)


def _sleep(cost: tuple[float, float], tokens: float) -> None:
    fixed, per_token = cost
    if tokens:
        time.sleep(fixed + per_token * tokens)


def _replace_compute(world: int) -> None:
    """In this process, for all that is loaded from now on."""

    def attention(_: LatentAttention, x: torch.Tensor, *__: Any) -> torch.Tensor:
        _sleep(ATTENTION, len(x))
        return x

    def network(_: Mlp, x: torch.Tensor) -> torch.Tensor:
        _sleep(SHARED, len(x))
        return x

    def experts(_: Experts, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        _sleep(EXPERTS, len(x) / world)
        return x * weights.masked_fill(experts < 0, 0).sum(1, keepdim=True)

    def module(self: MtpModule, *arguments: Any) -> None:
        load(self, *arguments)
        assert self._project is not None
        self._project = lambda both: both[:, : both.shape[1] // 2]  # type: ignore[assignment,method-assign]

    load: Callable[..., None] = MtpModule.__init__
    for place, name, stand_in in (
        (LatentAttention, "__call__", attention),
        (Mlp, "__call__", network),
        (Experts, "__call__", experts),
        (MtpModule, "__init__", module),
    ):
        setattr(place, name, stand_in)
