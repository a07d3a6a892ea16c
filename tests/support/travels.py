"""Tokens on their way to experts and back, in one process of several (see support.processes)."""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from raysonar.kernels.fp8 import dequantize_rows, quantize_rows
from raysonar.model.folder import open_folder
from raysonar.model.loading import load_model
from raysonar.moe.all_to_all import Tokens, dispatch
from raysonar.moe.communicator import Communicator, Place, Transfer, Wire, share
from raysonar.moe.experts import Experts

Routing = Literal["any", "one rank", "not the last rank", "each to one rank"]
Call = tuple[Any, ...]
INTERMEDIATE = 24


@dataclass(frozen=True)
class Trip:
    """The tokens of every data-parallel row, their routing, and how they travel; the same on every rank."""

    tokens: tuple[int, ...]
    tensor: int = 1
    experts: int = 8
    top_k: int = 3
    hidden: int = 40
    routing: Routing = "any"
    dtype: torch.dtype = torch.float32
    wire: Wire = field(default_factory=Wire)
    slack: int | None = None
    """Tokens of room beyond those there are; None: the rooms are not known."""
    seed: int = 0

    @property
    def world(self) -> int:
        return self.tensor * len(self.tokens)

    @property
    def capacities(self) -> tuple[int, ...]:
        return () if self.slack is None else tuple(count + self.slack for count in self.tokens)

    def owned(self, rank: int) -> slice:
        return share(self.experts, self.world, rank)

    def slices(self) -> list[slice]:
        """Which of all rows' tokens, put together, each rank dispatches."""
        ends = list(itertools.accumulate(self.tokens, initial=0))
        return [
            slice(first + part.start, first + part.stop)
            for first, count in zip(ends, self.tokens, strict=False)
            for part in (share(count, self.tensor, i) for i in range(self.tensor))
        ]

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states, experts and weights of all rows' tokens."""
        made = torch.Generator().manual_seed(self.seed)
        total = sum(self.tokens)
        scores = torch.rand((total, self.experts), generator=made)
        barred = torch.zeros_like(scores, dtype=torch.bool)
        if self.routing == "one rank":
            barred[:] = True
            barred[:, self.owned(1)] = False
        elif self.routing == "not the last rank":
            barred[:, self.owned(self.world - 1)] = True
        elif self.routing == "each to one rank":
            barred[:] = True
            for token in range(total):
                barred[token, self.owned(token % self.world)] = False
        chosen = scores.masked_fill(barred, -1).topk(self.top_k).indices
        assert not barred.gather(1, chosen).any()
        hidden = torch.randn((total, self.hidden), generator=made).to(self.dtype)
        return hidden, chosen, torch.rand((total, self.top_k), generator=made)

    def make_experts(self, own: slice) -> Experts:
        made = torch.Generator().manual_seed(self.seed + 1)
        shapes = (2 * INTERMEDIATE, self.hidden), (self.hidden, INTERMEDIATE)
        gate_up, down = (torch.randn((self.experts, *shape), generator=made) / shape[1] ** 0.5 for shape in shapes)
        experts = Experts(own.stop - own.start)
        for slot, expert in enumerate(range(own.start, own.stop)):
            experts.put(slot, gate_up[expert].to(self.dtype), down[expert].to(self.dtype))
        return experts

    def of_one_rank(self) -> torch.Tensor:
        """What the tokens are to come back as."""
        hidden, experts, weights = self.inputs()
        if self.wire.float8:
            hidden = dequantize_rows(*quantize_rows(hidden), self.dtype)
        return self.make_experts(slice(0, self.experts))(hidden, experts, weights)

    def go(self, communicator: Communicator) -> Iterator[torch.Tensor | None]:
        """This rank's tokens there and back: None where they travel, then what came back."""
        communicator.wire = self.wire
        rank = communicator.place.rank
        own = self.slices()[rank]
        hidden, experts, weights = (each[own] for each in self.inputs())
        serve = self.make_experts(self.owned(rank))
        tokens = Tokens(hidden=hidden, experts=experts, weights=weights, total_experts=self.experts)
        sent = yield from dispatch(communicator, tokens, self.capacities)
        yield None
        routed = sent.wait()
        combine = sent.combine(serve(routed.hidden, routed.experts, routed.weights))
        yield None
        yield combine.wait()


class Recording(Communicator):
    """Writes down its collectives: ("counts",), and ("exchange", items sent to, and received from, each rank)."""

    calls: list[Call]

    def exchange_counts(self, counts: torch.Tensor) -> tuple[torch.Tensor, Transfer]:
        self.calls.append(("counts",))
        return super().exchange_counts(counts)

    def exchange(self, name: str, outgoing: list[torch.Tensor], incoming: list[torch.Tensor]) -> Transfer:
        self.calls.append(("exchange", [len(each) for each in outgoing], [len(each) for each in incoming]))
        return super().exchange(name, outgoing, incoming)


@cache
def recorders(rank: int, tensor: int) -> list[Recording]:
    """One for each half; every process asks for the same ones in the same order."""
    place = Place(rank=rank, tensor=tensor, data=dist.get_world_size() // tensor)
    return [Recording.of_default_group(place, 20.0, Wire()) for _ in range(2)]


def travel(rank: int, trips: list[Trip]) -> list[tuple[torch.Tensor, list[Call]]]:
    """Each trip's outcome for this rank's tokens, and the collectives it took."""
    outcomes = []
    for trip in trips:
        communicator = recorders(rank, trip.tensor)[0]
        communicator.calls = []
        *_, out = trip.go(communicator)
        assert out is not None
        outcomes.append((out, communicator.calls))
    return outcomes


def interleave(rank: int, halves: list[Trip], seed: int) -> list[torch.Tensor]:
    """Two trips at once, each by its own half's communicator, resumed in an order that the seed chooses."""
    going = []
    for trip, communicator in zip(halves, recorders(rank, halves[0].tensor), strict=True):
        communicator.calls = []
        going.append(trip.go(communicator))
    turns, outs = random.Random(seed), dict[int, torch.Tensor]()
    while len(outs) < 2:
        half = turns.choice([half for half in (0, 1) if half not in outs])
        out = next(going[half])
        if out is not None:
            outs[half] = out
    return [outs[0], outs[1]]


def posted(rank: int, trip: Trip) -> list[list[tuple[str, str]]]:
    """The (kind, process group) of each operation that each exchange hands to torch.distributed, for both halves."""
    batches, real = [], dist.batch_isend_irecv

    def record(operations: list[dist.P2POp]) -> list[dist.Work]:
        batches.append([(each.op.__name__, each.group.group_name) for each in operations])
        return real(operations)

    dist.batch_isend_irecv = record
    try:
        interleave(rank, [trip, trip], seed=0)
    finally:
        dist.batch_isend_irecv = real
    return batches


def layer_output(rank: int, folder: Path, float8: bool) -> torch.Tensor:
    """The last layer's output for tokens that differ from rank to rank, in bf16, before the norm."""
    from support.forward import PagedRun

    communicators = recorders(rank, 1)
    for communicator in communicators:
        communicator.calls, communicator.wire = [], Wire(float8=float8)
    model = load_model(
        open_folder(folder), dtype=torch.bfloat16, device=torch.device("cpu"), communicators=communicators
    )
    tokens = torch.randint(300, (20,), generator=torch.Generator().manual_seed(rank)).tolist()
    return PagedRun(model, rows=1, length=len(tokens)).step({0: tokens})[0]
