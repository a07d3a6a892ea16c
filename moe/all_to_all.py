"""Tokens to the ranks that own their experts, and back.

A dispatch and a combine each start a transfer; `wait` ends it. Between the two the rank is free to compute something
else. There are two ways:

- exact: the sizes are exchanged first, which takes a latency and reads them back from the device. A token
  travels once to each rank that owns one or more of its experts, and to no other.
- padded: every rank's tokens, up to a number that all ranks know beforehand, travel to every rank, and each takes
  those that have an expert of its own. Nothing is exchanged first, nothing read back. Since all of a rank's tokens may
  need the same other rank, and only the router knows, room for fewer could not be promised.

Padding saves a latency, and costs the bytes that travel in vain: it pays while those take less time than the latency.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """This rank's N tokens, and where they are to go."""

    hidden: torch.Tensor
    """[N, hidden]."""
    experts: torch.Tensor
    """int64 [N, top_k], of all experts."""
    weights: torch.Tensor
    """fp32 [N, top_k]."""
    total_experts: int

    def __len__(self) -> int:
        return len(self.hidden)


def dispatch(
    communicator: Communicator, tokens: Tokens, capacities: Sequence[int] = ()
) -> Generator[None, None, Dispatch]:
    """Start sending this rank's tokens; all ranks call it together. Yields while sizes are exchanged, if they are.

    capacities: the most tokens of each data-parallel row, the same on all ranks, shared out over the row's ranks as
    `Place.share` does; empty where they are not known.
    """
    place, wire, hidden = communicator.place, communicator.wire, tokens.hidden
    row = RowFormat(hidden=hidden.shape[1], top_k=tokens.experts.shape[1], dtype=hidden.dtype, float8=wire.float8)
    room = [-(-capacity // place.tensor) for capacity in capacities]
    if room and _in_vain(max(room), place.world, row) <= wire.padded_bytes:
        per_rank = [size for size in room for _ in range(place.tensor)]
        with communicator.track.span("send to experts"):
            return _PaddedDispatch(communicator, row, tokens, per_rank)
    return (yield from _dispatch_exactly(communicator, row, tokens))


def _in_vain(tokens: int, world: int, row: RowFormat) -> float:
    """Bytes that a rank with so many tokens sends, when padded, to ranks that do not need them: where experts are
    chosen evenly, a token has none on a given rank with probability (1 - 1/world)^top_k.

    All ranks must decide alike, so this is made of what they all know, and not of the routing.
    """
    return (world - 1) * tokens * row.row_bytes * (1 - 1 / world) ** row.top_k


def _dispatch_exactly(
    communicator: Communicator, row: RowFormat, tokens: Tokens
) -> Generator[None, None, "_ExactDispatch"]:
    world, track = communicator.place.world, communicator.track
    with track.span("count for experts"):
        wanted = torch.zeros((world, len(tokens)), dtype=torch.bool, device=tokens.hidden.device)
        wanted.scatter_(0, (tokens.experts // -(-tokens.total_experts // world)).T, True)
        sent = wanted.sum(1)
        received, counts = communicator.exchange_counts(sent)
    yield
    counts.wait()
    with track.span("send to experts"):
        sizes = torch.stack((sent, received)).tolist()
        return _ExactDispatch(communicator, row, tokens, wanted.nonzero()[:, 1], *sizes)


class _Dispatch:
    """What both ways have in common."""

    def __init__(self, communicator: Communicator, row: RowFormat, tokens: Tokens, arriving: torch.Tensor) -> None:
        place = communicator.place
        self._communicator, self._row, self._tokens, self._arriving = communicator, row, len(tokens), arriving
        self._own = share(tokens.total_experts, place.world, place.rank)
        self._transfer: Transfer

    def _exchange(self, leaving: list[torch.Tensor], sizes: list[int]) -> None:
        arriving = list(self._arriving.split_with_sizes(sizes))
        self._transfer = self._communicator.exchange("dispatch", leaving, arriving)

    def wait(self) -> Routed:
        self._transfer.wait()
        return self._row.unpack(self._arriving, self._own)


class _ExactDispatch(_Dispatch):
    def __init__(
        self,
        communicator: Communicator,
        row: RowFormat,
        tokens: Tokens,
        token_of: torch.Tensor,
        sent: list[int],
        received: list[int],
    ) -> None:
        """token_of: int64 [sum(sent)], which token leaves at each place; sent, received: tokens, by rank."""
        packed = row.pack(tokens.hidden, tokens.experts, tokens.weights, rows=len(tokens))
        super().__init__(communicator, row, tokens, packed.new_empty((sum(received), row.row_bytes)))
        self._token_of, self._sent, self._received = token_of, sent, received
        self._exchange(list(packed.index_select(0, token_of).split_with_sizes(sent)), received)

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


class _PaddedDispatch(_Dispatch):
    def __init__(self, communicator: Communicator, row: RowFormat, tokens: Tokens, capacities: list[int]) -> None:
        """capacities: of each rank."""
        place = communicator.place
        room = capacities[place.rank]
        if len(tokens) > room:
            raise ValueError(
                f"rank {place.rank} has {len(tokens)} tokens to dispatch, and the plan has room for {room}: a plan's "
                "capacities must bound every rank's tokens"
            )
        leaving = row.pack(tokens.hidden, tokens.experts, tokens.weights, rows=room)
        super().__init__(communicator, row, tokens, leaving.new_empty((sum(capacities), row.row_bytes)))
        self._capacities = capacities
        self._exchange([leaving] * place.world, capacities)

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
