"""Tokens to the ranks that own their experts, and back.

A dispatch and a combine each start a transfer; `wait` ends it. Between the two the rank is free to compute something
else. A token travels once to each rank that owns one or more of its experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raysonar.moe.communicator import Communicator, share


@dataclass(frozen=True)
class Routed:
    """Tokens at the rank that owns some of their experts: M tokens from all ranks, sorted by rank."""

    hidden: torch.Tensor
    """[M, hidden]."""
    experts: torch.Tensor
    """int64 [M, top_k]: among this rank's own experts, from 0; -1 for other ranks' experts."""
    weights: torch.Tensor
    """fp32 [M, top_k]."""


class Dispatch:
    """Tokens on their way to their experts' ranks."""

    def __init__(
        self,
        communicator: Communicator,
        *,
        hidden: torch.Tensor,
        experts: torch.Tensor,
        weights: torch.Tensor,
        total_experts: int,
    ) -> None:
        """hidden: [N, hidden]; experts: int64 [N, top_k], of all experts; weights: fp32 [N, top_k]. The sizes are
        exchanged first, which waits for the slowest rank."""
        self._communicator = communicator
        self._hidden, self._top_k = hidden, experts.shape[1]
        world = communicator.place.world
        own = share(total_experts, world, communicator.place.rank)
        per_rank = -(-total_experts // world)
        wanted = torch.zeros((world, len(hidden)), dtype=torch.bool, device=hidden.device)
        wanted.scatter_(0, (experts // per_rank).T, True)
        rank_of, self._token_of = wanted.nonzero(as_tuple=True)
        sent = torch.bincount(rank_of, minlength=world)
        received = communicator.exchange_counts(sent)
        self._sent, self._received = sent.tolist(), received.tolist()
        self._own = own
        payload = _pack(hidden[self._token_of], experts[self._token_of], weights[self._token_of])
        self._arriving = payload.new_empty((sum(self._received), payload.shape[1]))
        self._transfer = communicator.exchange(
            "dispatch",
            list(payload.split_with_sizes(self._sent)),
            list(self._arriving.split_with_sizes(self._received)),
        )

    def wait(self) -> Routed:
        """The tokens that have come to this rank."""
        self._transfer.wait()
        hidden, experts, weights = _unpack(self._arriving, self._hidden, self._top_k)
        local = experts - self._own.start
        foreign = (local < 0) | (experts >= self._own.stop)
        return Routed(hidden, local.masked_fill(foreign, -1), weights)

    def combine(self, outputs: torch.Tensor) -> "Combine":
        """Start sending the experts' weighted sums back: outputs [M, hidden], in the order of `wait`'s tokens."""
        return Combine(self._communicator, outputs, self._received, self._sent, self._token_of, len(self._hidden))


class Combine:
    """Experts' outputs on their way back to the tokens' own ranks."""

    def __init__(
        self,
        communicator: Communicator,
        outputs: torch.Tensor,
        outgoing: Sequence[int],
        incoming: Sequence[int],
        token_of: torch.Tensor,
        tokens: int,
    ) -> None:
        self._token_of, self._tokens = token_of, tokens
        self._arriving = outputs.new_empty((sum(incoming), outputs.shape[1]))
        self._transfer = communicator.exchange(
            "combine", list(outputs.split_with_sizes(outgoing)), list(self._arriving.split_with_sizes(incoming))
        )

    def wait(self) -> torch.Tensor:
        """[N, hidden]: each token's sum over ranks, in their order."""
        self._transfer.wait()
        out = self._arriving.new_zeros((self._tokens, self._arriving.shape[1]))
        return out.index_add_(0, self._token_of, self._arriving)


def _pack(hidden: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """One uint8 row a token: hidden state, expert ids as int32, weights as fp32; so that one message carries all."""
    parts = (hidden.contiguous(), experts.to(torch.int32), weights.contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], 1)


def _unpack(payload: torch.Tensor, like: torch.Tensor, top_k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sizes = [like.shape[1] * like.element_size(), 4 * top_k, 4 * top_k]
    hidden, experts, weights = (part.contiguous() for part in payload.split_with_sizes(sizes, 1))
    return hidden.view(like.dtype), experts.view(torch.int32).long(), weights.view(torch.float32)
