"""The ranks of a group and the collectives between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Self

import torch
import torch.distributed as dist

from raysonar.observe.timeline import Track


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank stands in its group of tensor x data ranks: rank = data_rank * tensor + tensor_rank.

    Attention is tensor-parallel over the ranks of one data-parallel row and data-parallel over rows; experts are spread
    over all ranks.
    """

    rank: int = 0
    tensor: int = 1
    data: int = 1

    @property
    def world(self) -> int:
        """Ranks in the group."""
        return self.tensor * self.data

    @property
    def tensor_rank(self) -> int:
        """Within the data-parallel row."""
        return self.rank % self.tensor

    @property
    def data_rank(self) -> int:
        """Which data-parallel row."""
        return self.rank // self.tensor

    def share(self, total: int) -> slice:
        """This rank's part of `total` things split over the ranks of its row, the first ranks' parts the larger."""
        return share(total, self.tensor, self.tensor_rank)


def share(total: int, parts: int, index: int) -> slice:
    """Part `index` of `total` things split evenly over `parts`: ceil(total / parts) each, as long as there are any."""
    size = -(-total // parts)
    return slice(min(index * size, total), min((index + 1) * size, total))


class Transfer:
    """Tensors on their way between ranks; only what `wait` blocks for is not hidden behind other work."""

    def __init__(self, name: str, track: Track, works: Sequence[dist.Work]) -> None:
        self._name, self._track, self._works = name, track, works
        self._began = track.clock()

    def wait(self) -> None:
        """Until all have come and gone."""
        if not self._works:
            return
        with self._track.waiting(f"wait for {self._name}"):
            for work in self._works:
                work.wait()
        self._track.keep(self._name, "transfer", self._began, self._track.clock())


@dataclass(frozen=True, kw_only=True)
class Wire:
    """How tokens travel to their experts' ranks; the same on all ranks."""

    float8: bool = False
    """In blocks of fp8 instead of the model's dtype."""
    padded_bytes: int = 0
    """The most bytes that any rank may send in vain for a dispatch to be padded (`raysonar.moe.all_to_all`)."""


_PLAIN = Wire()


class Communicator:
    """The collectives of one rank. Every rank of the group calls the same ones in the same order.

    Attributes:
        place: where the rank stands.
        wire: how tokens travel to their experts.
        track: how the half of the steps that it serves spends its time.
    """

    def __init__(
        self, place: Place, world: dist.ProcessGroup | None, row: dist.ProcessGroup | None, wire: Wire = _PLAIN
    ) -> None:
        """world: the process group of all ranks; row: that of the data-parallel row; None where there is one rank."""
        self.place = place
        self.wire = wire
        self.track = Track()
        self._world = world
        self._row = row

    @classmethod
    def alone(cls) -> Self:
        """Of a group of one rank: every collective is the identity."""
        return cls(Place(), None, None)

    @classmethod
    def of_default_group(cls, place: Place, timeout_s: float, wire: Wire = _PLAIN) -> Self:
        """Over torch.distributed's default group, which must be up; a collective that takes longer fails."""
        timeout = timedelta(seconds=timeout_s)
        world = dist.new_group(timeout=timeout)
        rows = [
            dist.new_group([row * place.tensor + i for i in range(place.tensor)], timeout=timeout)
            for row in range(place.data)
        ]
        return cls(place, world, rows[place.data_rank] if place.tensor > 1 else None, wire)

    def sum_over_world(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' tensors, in place."""
        if self._world is not None:
            with self.track.waiting("sum over world"):
                dist.all_reduce(x, group=self._world)
        return x

    def sum_over_row(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of the row's ranks' tensors, in place."""
        if self._row is not None:
            with self.track.waiting("sum over row"):
                dist.all_reduce(x, group=self._row)
        return x

    def gather_over_row(self, x: torch.Tensor, total: int, *, dim: int) -> torch.Tensor:
        """The row's ranks' parts of `total` (as `Place.share` splits it) along `dim`, put together."""
        if self._row is None:
            return x
        tensor = self.place.tensor
        sizes = [(part := share(total, tensor, i)).stop - part.start for i in range(tensor)]
        shape = list(x.shape)
        shape[dim] = sizes[0]
        padded = x.new_zeros(shape)
        padded.narrow(dim, 0, x.shape[dim]).copy_(x)
        parts = [torch.empty_like(padded) for _ in range(tensor)]
        with self.track.waiting("gather over row"):
            dist.all_gather(parts, padded, group=self._row)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)

    def broadcast_over_row(self, x: torch.Tensor) -> torch.Tensor:
        """The tensor of the row's first rank, in place."""
        if self._row is not None:
            with self.track.waiting("broadcast over row"):
                dist.broadcast(x, group_src=0, group=self._row)
        return x

    def exchange_counts(self, counts: torch.Tensor) -> tuple[torch.Tensor, Transfer]:
        """int64 [world], what this rank has for each rank -> int64 [world], what each rank has for this one, once the
        transfer has ended."""
        if self._world is None:
            return counts, Transfer("counts", self.track, ())
        received = torch.empty_like(counts)
        work = dist.all_to_all_single(received, counts, group=self._world, async_op=True)
        return received, Transfer("counts", self.track, (work,))

    def exchange(self, name: str, outgoing: list[torch.Tensor], incoming: list[torch.Tensor]) -> Transfer:
        """Start sending a tensor to, and receiving one from, every other rank; empty ones do not travel.

        Receives are posted before sends, which keeps gloo's links busy both ways. This rank's own tensor is copied.
        """
        me = self.place.rank
        incoming[me].copy_(outgoing[me])
        if self._world is None:
            return Transfer(name, self.track, ())
        others = [(me + step) % self.place.world for step in range(1, self.place.world)]
        receives = [
            dist.P2POp(dist.irecv, incoming[peer], group=self._world, group_peer=peer)
            for peer in others
            if incoming[peer].numel()
        ]
        sends = [
            dist.P2POp(dist.isend, outgoing[peer], group=self._world, group_peer=peer)
            for peer in others
            if outgoing[peer].numel()
        ]
        operations = receives + sends
        return Transfer(name, self.track, dist.batch_isend_irecv(operations) if operations else ())


def communicators_of_one_rank() -> list[Communicator]:
    """For both halves of a step, in a group of one rank; with tracks of their own, so engines share nothing."""
    return [Communicator.alone() for _ in range(2)]
