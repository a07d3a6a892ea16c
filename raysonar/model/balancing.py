"""Moves experts between ranks so that each has about the same to do (after DeepSeek's EPLB)."""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch

from raysonar.model.moe import Moe
from raysonar.model.weights import Weights
from raysonar.moe.communicator import Communicator
from raysonar.moe.placement import balanced_placement

logger = logging.getLogger(__name__)


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
    def rebalance(self) -> None:
        """Between two steps, on every rank at once."""
        loads = self._communicator.sum_over_world(torch.stack([layer.load for layer in self._layers]))
        moved, before, after = 0, 0.0, 0.0
        with self._open_weights() as weights:
            for layer, load in zip(self._layers, loads.tolist(), strict=True):
                placement = balanced_placement(load, layer.placement)
                before = max(before, layer.placement.imbalance(load))
                after = max(after, placement.imbalance(load))
                if placement != layer.placement:
                    moved += layer.move(placement, weights)
                layer.load.zero_()
        rank = self._communicator.place.rank
        logger.info("rank %d read %d experts; worst imbalance of a layer %.2f, then %.2f", rank, moved, before, after)
