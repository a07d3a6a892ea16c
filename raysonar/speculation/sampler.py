"""Sampling parameters per slot, and the scores they make of logits.

The order is vLLM's: the grammar's mask, logit_bias, the ban before min_length, repetition penalty, frequency and
presence penalties, temperature, min_p, top_k, top_p. A token that may not be chosen scores -inf; softmax of the scores
is the distribution that tokens are drawn from, for the target and for its draft alike. Nothing gives back what the
grammar rules out, and a ban that would leave nothing to choose is void.
"""

from collections.abc import Callable, Sequence
from enum import IntFlag
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from raysonar.kernels import noise
from raysonar.kernels.noise import Stream
from raysonar.speculation.grammar import GrammarTable, allowed
from raysonar.step import Floats, Ints, Rule

if TYPE_CHECKING:
    from xgrammar import CompiledGrammar

T = TypeVar("T")


class Need(IntFlag):
    """What a slot's parameters make of its logits; GREEDY slots need nothing that leaves the argmax alone."""

    BIAS = 1
    BAN = 2
    PENALTIES = 4
    TEMPERATURE = 8
    MIN_P = 16
    TRUNCATION = 32
    GRAMMAR = 64


class _TokenValues:
    """For each slot a few (token, value) pairs, padded with (0, 0.0) to the most that any slot had so far."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._token = torch.zeros(slots, 0, dtype=torch.int64, device=device)
        self._value = torch.zeros(slots, 0, device=device)

    def admit(self, admitted: Tensor, slot: Ints, token: Ints, value: Floats) -> None:
        """Forget what the slots `admitted` had; take the pairs of `slot` (each one of the admitted)."""
        self._token[admitted], self._value[admitted] = 0, 0.0
        if not slot.size:
            return
        order = np.argsort(slot, kind="stable")
        ordered = slot[order]
        column = np.arange(slot.size) - np.searchsorted(ordered, ordered)
        grow = int(column.max()) + 1 - self._token.shape[1]
        if grow > 0:
            self._token = torch.nn.functional.pad(self._token, (0, grow))
            self._value = torch.nn.functional.pad(self._value, (0, grow))
        place = (_upload(ordered, admitted.device), _upload(column, admitted.device))
        self._token[place] = _upload(token[order], admitted.device)
        self._value[place] = torch.from_numpy(value[order].astype(np.float32)).to(admitted.device)

    def added(self, scores: Tensor, slots: Tensor, where: Tensor | None = None) -> Tensor:
        """`scores` [N, V] plus each row's values, in the rows `where` (bool [N, 1]) only."""
        value = self._value[slots]
        return scores.scatter_add(1, self._token[slots], value if where is None else torch.where(where, value, 0.0))


class SamplingTable:
    """The sampling parameters of every slot, on the device; and on the host, what each slot needs."""

    def __init__(self, slots: int, vocab: int, device: torch.device) -> None:
        self.vocab = vocab
        self.device = device
        self.bias = _TokenValues(slots, device)
        self.banned = _TokenValues(slots, device)
        self.floats = torch.zeros(slots, len(_Floats._fields), device=device)
        self.integers = torch.zeros(slots, len(_Integers._fields), dtype=torch.int64, device=device)
        self.rules = np.zeros(slots, np.int32)
        self.needs = np.zeros(slots, np.int32)
        self.grammars = GrammarTable(vocab)

    def admit(
        self,
        slots: Ints,
        records: NDArray[Any],
        bias_slot: Ints,
        bias_token: Ints,
        bias_value: Floats,
        banned_slot: Ints,
        banned_token: Ints,
    ) -> None:
        """Set the parameters of `slots` [A] (each once) to `records` (SAMPLING [A]), whatever they had before.

        Bias and banned pairs are of admitted slots. Raises ValueError for a token outside the vocabulary.
        """
        if not slots.size:
            return
        for token in (bias_token, banned_token):
            if token.size and not 0 <= token.min() <= token.max() < self.vocab:
                raise ValueError(f"tokens must be from 0 to {self.vocab - 1}, got {token.min()} to {token.max()}")
        self.grammars.forget(slots)
        on_device = _upload(slots, self.device)
        self.bias.admit(on_device, bias_slot, bias_token, bias_value)
        self.banned.admit(on_device, banned_slot, banned_token, np.full(banned_token.shape, -np.inf, np.float32))
        floats, integers = _parameters(records, self.vocab)
        self.floats[on_device] = torch.from_numpy(floats).to(self.device)
        self.integers[on_device] = torch.from_numpy(integers).to(self.device)
        self.rules[slots] = records["rule"]
        self.needs[slots] = _needs(records) | Need.BIAS * np.isin(slots, bias_slot)
        self.needs[slots] |= Need.BAN * (np.isin(slots, banned_slot) & (records["min_length"] > 0))

    def constrain(self, slot: int, compiled: "CompiledGrammar", answer: Sequence[int]) -> None:
        """Put an admitted slot, whose answer begins with these tokens, under a grammar."""
        self.grammars.admit(slot, compiled, answer)
        self.needs[slot] |= Need.GRAMMAR

    def rows(self, slots: Ints, seen: Callable[[], Sequence[Sequence[int]]] | None = None) -> "SamplingRows":
        """The parameters of a call's rows, [N] slots (numpy, repeats allowed).

        seen: gives the drafts that each row has seen behind its slot's accepted tokens; called where grammars need it.
        Raises ValueError when they do and it was not given.
        """
        if not self.grammars.cover(slots):
            return SamplingRows(self, slots)
        if seen is None:
            raise ValueError("rows under a grammar need the drafts that they have seen")
        return SamplingRows(self, slots, self.grammars.masks(slots, seen()).to(self.device))


class _Floats(NamedTuple, Generic[T]):
    """Columns of `SamplingTable.floats`; each [N, 1] when taken for rows."""

    temperature: T
    top_p: T
    log_min_p: T
    presence: T
    frequency: T
    repetition: T


class _Integers(NamedTuple, Generic[T]):
    """Columns of `SamplingTable.integers`; each [N] when taken for rows."""

    top_k: T
    prompt_tokens: T
    min_length: T
    noise_key: T
    draft_stream: T


class SamplingRows:
    """N rows of a call: logit rows of the target or of the draft, each with its slot's parameters.

    Made once per step and kept while its rows are worked on; what the device holds is gathered on first use, so rows
    that need nothing cost nothing.
    """

    def __init__(self, table: SamplingTable, slots: Ints, masks: Tensor | None = None) -> None:
        """masks: what the grammars allow, `GrammarTable.masks`; None when no row has a grammar."""
        self.table = table
        self.masks = masks
        self.host_slots = slots
        self.rules: Ints = table.rules[slots]
        self.needs: Ints = table.needs[slots]

    def __len__(self) -> int:
        return len(self.host_slots)

    @cached_property
    def slots(self) -> Tensor:
        """int64 [N] on the device."""
        return _upload(self.host_slots, self.table.device)

    @cached_property
    def floats(self) -> _Floats[Tensor]:
        """The float parameters, float32 [N, 1] each."""
        return _Floats(*self.table.floats[self.slots, :, None].unbind(1))

    @cached_property
    def integers(self) -> _Integers[Tensor]:
        """The integer parameters, int64 [N] each."""
        return _Integers(*self.table.integers[self.slots].unbind(1))

    @cached_property
    def noisy(self) -> NDArray[np.int64]:
        """Which of the rows are not GREEDY."""
        return np.flatnonzero(self.rules != Rule.GREEDY)

    def take(self, index: NDArray[np.int64]) -> "SamplingRows":
        """Some of the rows."""
        masks = None if self.masks is None else self.masks[_upload(index, self.table.device)]
        return SamplingRows(self.table, self.host_slots[index], masks)

    def scores(self, logits: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
        """What the rows' tokens are chosen by.

        Args:
            logits: float32 [N, V]; not changed.
            positions: int64 [N], the index in its slot's text of the token that each row chooses.
            tokens: integers [S, L], every slot's text; L may be cut to the largest of the positions. Row i has seen
                tokens[slot, :position], the drafts before its own position among them.

        Returns:
            float32 [N, V]; the logits themselves when no row needs anything.
        """
        scores = logits
        needs = int(np.bitwise_or.reduce(self.needs, initial=0))
        for need, stage in _STAGES:
            if not needs & need:
                continue
            which = np.flatnonzero(self.needs & need)
            if which.size == len(self):
                scores = stage(self, scores, positions, tokens)
                continue
            index = _upload(which, self.table.device)
            scores = logits.clone() if scores is logits else scores
            scores[index] = stage(self.take(which), scores[index], positions[index], tokens)
        return scores


def _upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """int64 on the device."""
    return torch.from_numpy(array.astype(np.int64, copy=False)).to(device, non_blocking=True)


def _parameters(records: NDArray[Any], vocab: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The table's columns for SAMPLING records: an "off" becomes the value that changes nothing."""
    with np.errstate(divide="ignore"):
        log_min_p = np.log(records["min_p"])
    floats = _Floats(
        temperature=records["temperature"],
        top_p=np.where(records["top_p"] < 1, records["top_p"], np.inf),
        log_min_p=log_min_p,
        presence=records["presence_penalty"],
        frequency=records["frequency_penalty"],
        repetition=records["repetition_penalty"],
    )
    integers = _Integers(
        top_k=np.where(records["top_k"] > 0, np.minimum(records["top_k"], vocab), vocab),
        prompt_tokens=records["prompt_tokens"],
        min_length=records["min_length"],
        noise_key=noise.keys(torch.from_numpy(records["seed"].astype(np.int64))).numpy(),
        draft_stream=np.where(records["rule"] == Rule.COUPLED, Stream.TARGET, Stream.DRAFT),
    )
    return np.stack(floats, 1).astype(np.float32), np.stack(integers, 1).astype(np.int64)


def _needs(records: NDArray[Any]) -> NDArray[np.int32]:
    """`Need` of each record, but for bias and ban."""
    drawn = records["rule"] != Rule.GREEDY
    penalised = (records["presence_penalty"] != 0) | (records["frequency_penalty"] != 0)
    truncated = (records["top_k"] > 0) | (records["top_p"] < 1)
    needs: NDArray[np.int32] = (
        Need.PENALTIES * (penalised | (records["repetition_penalty"] != 1))
        + Need.TEMPERATURE * (drawn & (records["temperature"] != 1))
        + Need.MIN_P * (drawn & (records["min_p"] > 0))
        + Need.TRUNCATION * (drawn & truncated)
    ).astype(np.int32)
    return needs


def _mask(rows: SamplingRows, scores: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    assert rows.masks is not None
    return torch.where(allowed(rows.masks, scores.shape[1]), scores, -torch.inf)


def _bias(rows: SamplingRows, scores: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    return rows.table.bias.added(scores, rows.slots)


def _ban(rows: SamplingRows, scores: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    early = positions < rows.integers.min_length
    banned = rows.table.banned.added(scores, rows.slots, early[:, None])
    return torch.where(banned.amax(1, keepdim=True) > -torch.inf, banned, scores)


def _penalise(rows: SamplingRows, scores: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Repetition penalty over the whole text (1909.05858); frequency and presence over the answer (OpenAI's)."""
    index = torch.arange(tokens.shape[1], device=tokens.device)
    known = index < positions[:, None]
    answer = known & (index >= rows.integers.prompt_tokens[:, None])
    text = torch.where(known, tokens[rows.slots], 0).long()
    seen = torch.zeros_like(scores).scatter_add_(1, text, known.float()) > 0
    count = torch.zeros_like(scores).scatter_add_(1, text, answer.float())
    _, _, _, presence, frequency, repetition = rows.floats
    repeated = torch.where(scores > 0, scores / repetition, scores * repetition)
    return torch.where(seen, repeated, scores) - frequency * count - presence * (count > 0)


def _temper(rows: SamplingRows, scores: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    return scores / rows.floats.temperature


def _min_p(rows: SamplingRows, scores: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Keep tokens at least min_p times as likely as the likeliest (2407.01082)."""
    least = scores.amax(1, keepdim=True) + rows.floats.log_min_p
    return torch.where(scores < least, -torch.inf, scores)


def _truncate(rows: SamplingRows, scores: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Keep the top_k likeliest; of these, the fewest whose probabilities (among the kept) reach top_p.

    Of equal scores the lower tokens stay.
    """
    rank = torch.arange(scores.shape[1], device=scores.device)
    falling = torch.where(rank < rows.integers.top_k[:, None], _falling(scores), -torch.inf)
    before = torch.nn.functional.pad(falling.softmax(1).cumsum(1)[:, :-1], (1, 0))
    # at least one, whatever rounding makes of a tiny top_p
    kept = ((before < rows.floats.top_p) & (falling > -torch.inf)).sum(1, keepdim=True).clamp(min=1)
    least = falling.gather(1, kept - 1)
    above, equal = scores > least, scores == least
    spare = kept - above.sum(1, keepdim=True)
    return torch.where(above | (equal & (equal.cumsum(1) <= spare)), scores, -torch.inf)


def _falling(scores: Tensor) -> Tensor:
    """Each row sorted from high to low. On the CPU numpy's vectorised sort takes a thirtieth of torch's time."""
    if scores.device.type == "cpu":
        return torch.from_numpy(np.sort(scores.numpy(), axis=1)).flip(1)
    return scores.sort(1, descending=True).values


_Stage = Callable[[SamplingRows, Tensor, Tensor, Tensor], Tensor]
_STAGES: tuple[tuple[Need, _Stage], ...] = (
    (Need.GRAMMAR, _mask),
    (Need.BIAS, _bias),
    (Need.BAN, _ban),
    (Need.PENALTIES, _penalise),
    (Need.TEMPERATURE, _temper),
    (Need.MIN_P, _min_p),
    (Need.TRUNCATION, _truncate),
)
