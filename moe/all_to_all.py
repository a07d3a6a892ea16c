"""Tokens to the ranks that own their experts, and back.

A dispatch and a combine each start a transfer; `wait` ends it. Between the two the rank is free to compute something
else. There are two ways:

- exact: the sizes are exchanged first, which waits for the slowest rank and reads them back from the device. A token
  travels once to each rank that owns one or more of its experts, and to no other.
- padded: every rank's tokens, up to a number that all ranks know beforehand, travel to every rank, and each takes
  those that have an expert of its own. Nothing is exchanged first, nothing read back. Since all of a rank's tokens may
  need the same other rank, and only the router knows, room for fewer could not be promised.

Padding saves a latency, and costs the bytes that travel in vain: it pays while those take less time than the latency.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from raysonar.moe.communicator import Communicator, Transfer, share
from raysonar.moe.payload import Routed, RowFormat


class Combine(Protocol):
    """Experts' outputs on their way back to the tokens' own ranks."""

    def wait(self) -> torch.Tensor:
        """[N, hidden]: each token's sum over ranks."""


class Dispatch(Protocol):
    """Tokens on their way to their experts' ranks."""

    def wait(self) -> Routed:
        """The tokens that have come to this rank."""

    def combine(self, outputs: torch.Tensor) -> Combine:
        """Start sending the experts' weighted sums back: outputs [M, hidden], in the order of `wait`'s tokens."""


def dispatch(
    communicator: Communicator,
    *,
    hidden: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    total_experts: int,
    capacities: Sequence[int] = (),
) -> Dispatch:
    """Start sending this rank's N tokens; all ranks call it together.

    hidden: [N, hidden]; experts: int64 [N, top_k], of all experts; weights: fp32 [N, top_k]. capacities: the most
    tokens of each data-parallel row, the same on all ranks, shared out over the row's ranks as `Place.share` does;
    empty where they are not known.
    """
    place, wire = communicator.place, communicator.wire
    row = RowFormat(hidden=hidden.shape[1], top_k=experts.shape[1], dtype=hidden.dtype, float8=wire.float8)
    room = [-(-capacity // place.tensor) for capacity in capacities]
    if room and _in_vain(max(room), place.world, row) <= wire.padded_bytes:
        per_rank = [size for size in room for _ in range(place.tensor)]
        return _PaddedDispatch(communicator, row, hidden, experts, weights, total_experts, per_rank)
    return _ExactDispatch(communicator, row, hidden, experts, weights, total_experts)


def _in_vain(tokens: int, world: int, row: RowFormat) -> float:
    """Bytes that a rank with so many tokens sends, when padded, to ranks that do not need them: where experts are
    chosen evenly, a token has none on a given rank with probability (1 - 1/world)^top_k.

    All ranks must decide alike, so this is made of what they all know, and not of the routing.
    """
    return (world - 1) * tokens * row.row_bytes * (1 - 1 / world) ** row.top_k


class _ExactDispatch:
    def __init__(
        self,
        communicator: Communicator,
        row: RowFormat,
        hidden: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        total_experts: int,
    ) -> None:
        world = communicator.place.world
        self._communicator, self._row, self._tokens = communicator, row, len(hidden)
        self._own = share(total_experts, world, communicator.place.rank)
        per_rank = -(-total_experts // world)
        wanted = torch.zeros((world, len(hidden)), dtype=torch.bool, device=hidden.device)
        wanted.scatter_(0, (experts // per_rank).T, True)
        sent = wanted.sum(1)
        received = communicator.exchange_counts(sent)
        self._sent, self._received = torch.stack((sent, received)).tolist()
        self._token_of = wanted.nonzero()[:, 1]
        leaving = row.pack(hidden, experts, weights, rows=len(hidden)).index_select(0, self._token_of)
        self._arriving = leaving.new_empty((sum(self._received), row.row_bytes))
        self._transfer = communicator.exchange(
            "dispatch",
            list(leaving.split_with_sizes(self._sent)),
            list(self._arriving.split_with_sizes(self._received)),
        )

    def wait(self) -> Routed:
        self._transfer.wait()
        return self._row.unpack(self._arriving, self._own)

    def combine(self, outputs: torch.Tensor) -> "_ExactCombine":
        arriving = outputs.new_empty((sum(self._sent), outputs.shape[1]))
        transfer = self._communicator.exchange(
            "combine", list(outputs.split_with_sizes(self._received)), list(arriving.split_with_sizes(self._sent))
        )
        return _ExactCombine(transfer, arriving, self._token_of, self._tokens)


class _ExactCombine:
    def __init__(self, transfer: Transfer, arriving: torch.Tensor, token_of: torch.Tensor, tokens: int) -> None:
        self._transfer, self._arriving, self._token_of, self._tokens = transfer, arriving, token_of, tokens

    def wait(self) -> torch.Tensor:
        """The sums run over ranks in their order."""
        self._transfer.wait()
        out = self._arriving.new_zeros((self._tokens, self._arriving.shape[1]))
        return out.index_add_(0, self._token_of, self._arriving)


class _PaddedDispatch:
    def __init__(
        self,
        communicator: Communicator,
        row: RowFormat,
        hidden: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        total_experts: int,
        capacities: list[int],
    ) -> None:
        """capacities: of each rank."""
        place = communicator.place
        if len(hidden) > capacities[place.rank]:
            raise ValueError(
                f"rank {place.rank} has {len(hidden)} tokens to dispatch, and the plan has room for "
                f"{capacities[place.rank]}: a plan's capacities must bound every rank's tokens"
            )
        self._communicator, self._row, self._tokens, self._capacities = communicator, row, len(hidden), capacities
        self._own = share(total_experts, place.world, place.rank)
        leaving = row.pack(hidden, experts, weights, rows=capacities[place.rank])
        self._arriving = leaving.new_empty((sum(capacities), row.row_bytes))
        self._transfer = communicator.exchange(
            "dispatch", [leaving] * place.world, list(self._arriving.split_with_sizes(capacities))
        )

    def wait(self) -> Routed:
        self._transfer.wait()
        return self._row.unpack(self._arriving, self._own)

    def combine(self, outputs: torch.Tensor) -> "_PaddedCombine":
        place = self._communicator.place
        arriving = outputs.new_empty((place.world, self._capacities[place.rank], outputs.shape[1]))
        transfer = self._communicator.exchange(
            "combine", list(outputs.split_with_sizes(self._capacities)), list(arriving.unbind())
        )
        return _PaddedCombine(transfer, arriving, self._tokens)


class _PaddedCombine:
    def __init__(self, transfer: Transfer, arriving: torch.Tensor, tokens: int) -> None:
        self._transfer, self._arriving, self._tokens = transfer, arriving, tokens

    def wait(self) -> torch.Tensor:
        """Ranks without an expert of a token have sent zeros for it."""
        self._transfer.wait()
        return self._arriving[:, : self._tokens].sum(0)
