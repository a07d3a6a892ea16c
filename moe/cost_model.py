"""What a pass over a batch takes, in one piece and in two halves, from measured costs of its layers.

A layer computes for w + a B seconds on B tokens and communicates for l + c B. One batch takes the sum of both. Of two
halves one computes while the other's tokens travel, and while a half waits out its latency the other may send: a layer
takes as long as the rank computes, 2 w + a B, as the link sends, c B, or as one half does both, w + l + (a + c) B / 2,
whichever is the longest; and where the pipeline starts or drains, some of a half shows. So splitting pays only when
communication, l + c B, takes longer than w, as the weights are read twice. (Were latencies not to overlap, two halves
would take max(2 w + a B, 2 l + c B), and computing would have to take longer than l.) Costs are kept as measured points
and not as lines, since the way that tokens travel, and the efficiency of matrix products, change with their number.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

import numpy as np


@dataclass(frozen=True)
class Curve:
    """Seconds by tokens: straight between the measured points, and beyond the last two."""

    tokens: tuple[int, ...]
    """Growing; at least one."""
    seconds: tuple[float, ...]
    """Not falling."""

    @classmethod
    def of(cls, points: Mapping[int, float]) -> Self:
        """From seconds by tokens; where they fall, that is noise, and neighbours are averaged (isotonic regression)."""
        blocks: list[tuple[float, int]] = []  # (mean, points)
        for tokens in sorted(points):
            mean, size = points[tokens], 1
            while blocks and blocks[-1][0] >= mean:
                before, count = blocks.pop()
                mean, size = (before * count + mean * size) / (count + size), count + size
            blocks.append((mean, size))
        return cls(tuple(sorted(points)), tuple(mean for mean, size in blocks for _ in range(size)))

    def __call__(self, tokens: float) -> float:
        """Seconds for so many tokens; 0 for none."""
        if tokens <= 0:
            return 0.0
        if len(self.tokens) == 1 or tokens <= self.tokens[0]:
            return self.seconds[0]
        right = min(bisect_left(self.tokens, tokens), len(self.tokens) - 1)
        x0, x1 = self.tokens[right - 1 : right + 1]
        y0, y1 = self.seconds[right - 1 : right + 1]
        return y0 + (tokens - x0) * (y1 - y0) / (x1 - x0)

    def line(self) -> tuple[float, float]:
        """(fixed, per token): the straight line nearest to the points, by relative error."""
        if len(self.tokens) == 1:
            return self.seconds[0], 0.0
        weights = 1 / np.maximum(np.array(self.seconds), 1e-9)
        slope, fixed = np.polyfit(self.tokens, self.seconds, 1, w=weights)
        return max(float(fixed), 0.0), max(float(slope), 0.0)


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """Of one layer of a kind, on a rank with so many tokens; where ranks differ, of the slowest."""

    compute: Curve
    communication: Curve
    """From sending tokens to their arrival, both ways."""
    hidden: Curve
    """Of the communication, what one batch alone hides behind the shared experts."""

    def serial(self, tokens: float) -> float:
        """As one batch."""
        return self.compute(tokens) + max(self.communication(tokens) - self.hidden(tokens), 0.0)

    def split(self, half: float) -> float:
        """As two halves of `half` tokens, without fill."""
        compute, communication = self.compute(half), self.communication(half)
        return max(2 * compute, 2 * self.sending(half), compute + communication)

    def fill(self, half: float) -> float:
        """What shows of the other of computing and sending where the pipeline starts or drains."""
        return min(self.compute(half), self.sending(half) / 2)

    def sending(self, tokens: float) -> float:
        """Of the communication, what the link is busy: beyond the latency."""
        return max(self.communication(tokens) - self.latency, 0.0)

    @cached_property
    def latency(self) -> float:
        """Of the communication, what it takes whatever the number of tokens."""
        return self.communication.line()[0]


@dataclass(frozen=True, kw_only=True)
class PassCost:
    """Of a pass: its layers by kind, each with how many there are, and what is outside of layers."""

    layers: Mapping[str, tuple[int, LayerCost]]
    outside: Curve

    def serial(self, tokens: float) -> float:
        """Seconds as one batch."""
        return self.outside(tokens) + sum(count * cost.serial(tokens) for count, cost in self.layers.values())

    def split(self, tokens: float, half: float) -> float:
        """Seconds as two halves, the fuller of `half` tokens."""
        layers = sum(count * cost.split(half) for count, cost in self.layers.values())
        fill = max((cost.fill(half) for _, cost in self.layers.values()), default=0.0)
        return self.outside(tokens) + layers + fill

    def weights_outweigh(self, tokens: float, half: float) -> bool:
        """Whether computing in halves takes as long as one batch does in all: communication(B) <= w."""
        compute = sum(count * 2 * cost.compute(half) for count, cost in self.layers.values())
        return compute >= self.serial(tokens) - self.outside(tokens)

    def latency_outweighs(self, tokens: float) -> bool:
        """Whether the latencies take as long as computing: compute(B) <= l."""
        layers = self.layers.values()
        return sum(count * cost.latency for count, cost in layers) >= sum(
            count * cost.compute(tokens) for count, cost in layers
        )


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """Of a step's passes: the verification, and the draft where there is one."""

    verify: PassCost
    draft: PassCost | None
    tried: Mapping[int, Curve] = field(default_factory=dict)
    """Seconds of steps that were tried, with their draft run, by halves."""

    def seconds(self, tokens: Sequence[int], halves: Sequence[int] | None = None) -> tuple[float, float]:
        """(until the result, of the draft run behind it), as one batch or in halves of at most `halves` tokens.

        tokens, halves: of each pass: first the verification and the draft run over its batch, then the draft's rounds
        after the first, which belong to what the result waits for.
        """

        def of(cost: PassCost, number: int) -> float:
            return cost.serial(tokens[number]) if halves is None else cost.split(tokens[number], halves[number])

        until_result = of(self.verify, 0)
        if self.draft is None:
            return until_result, 0.0
        return until_result + sum(of(self.draft, number) for number in range(1, len(tokens))), of(self.draft, 0)

    def tried_ratio(self, halves: int, tokens: Sequence[int], in_halves: Sequence[int]) -> float:
        """What steps took when they were tried, over what `seconds` says; 1 when they were not."""
        if halves not in self.tried:
            return 1.0
        return self.tried[halves](tokens[0]) / sum(self.seconds(tokens, in_halves if halves == 2 else None))


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Of steps of one group of ranks."""

    decode: StepCost
    """Without prefill."""
    prefill: StepCost
    """With some."""
