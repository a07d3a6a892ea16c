"""Moves experts between ranks so that each has about the same to do (after DeepSeek's EPLB)."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from raysonar.model.moe import Moe
from raysonar.model.weights import Weights
from raysonar.moe.communicator import Communicator
from raysonar.moe.placement import balanced_placement

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExpertLoad:
    """What the experts had to do since the last time, where they were."""

    by_rank: list[float]
    """Tokens of each rank's experts, in all layers."""
    imbalance: float
    """The busiest rank's load over the mean, in the layer where that is worst."""


class ExpertBalancer:
    """Places the experts of every layer anew, by the tokens that they had since the last time.

    All ranks add up their loads and come to the same placement. A rank reads the experts that come to it from the
    checkpoint, which is in the page cache where memory allows. Nothing else of a step's state changes, nor does text.
    """

    def __init__(
        self,
        layers: Sequence[Moe],
        communicator: Communicator,
        open_weights: Callable[[], AbstractContextManager[Weights]],
    ) -> None:
        self._layers, self._communicator, self._open_weights = layers, communicator, open_weights

    @torch.inference_mode()
    def rebalance(self) -> ExpertLoad:
        """Between two steps, on every rank at once; the same everywhere."""
        loads = self._communicator.sum_over_world(torch.stack([layer.load for layer in self._layers]))
        moved, before, after = 0, 0.0, 0.0
        by_rank = [0.0] * self._communicator.place.world
        with self._open_weights() as weights:
            for layer, load in zip(self._layers, loads.tolist(), strict=True):
                placement = balanced_placement(load, layer.placement)
                before = max(before, layer.placement.imbalance(load))
                by_rank = [sum(pair) for pair in zip(by_rank, layer.placement.by_rank(load), strict=True)]
                after = max(after, placement.imbalance(load))
                if placement != layer.placement:
                    moved += layer.move(placement, weights)
                layer.load.zero_()
        rank = self._communicator.place.rank
        logger.info("rank %d read %d experts; worst imbalance of a layer %.2f, then %.2f", rank, moved, before, after)
        return ExpertLoad(by_rank, before)
