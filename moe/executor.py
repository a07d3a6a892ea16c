"""Runs forward passes that yield while a collective is in flight."""

from collections.abc import Generator, Sequence

import torch

Pass = Generator[None, None, torch.Tensor]
"""A forward pass: it yields where it would wait for other ranks, and returns its output."""


def run(passes: Sequence[Pass]) -> list[torch.Tensor]:
    """Resume the passes in turn until all have returned: while one waits for other ranks, another computes.

    All ranks resume the same passes in the same order, so their collectives match. If one raises, the others are
    closed and the error goes on: the step has failed as a whole.
    """
    outputs: list[torch.Tensor | None] = [None] * len(passes)
    running = list(enumerate(passes))
    try:
        while running:
            for item in list(running):
                index, each = item
                try:
                    next(each)
                except StopIteration as end:
                    outputs[index] = end.value
                    running.remove(item)
    finally:
        for _, each in running:
            each.close()
    return [output for output in outputs if output is not None]
