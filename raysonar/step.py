"""StepPlan and StepResult: what crosses between the driver and the ranks, one packed buffer each way.

A rank keeps, per slot, the token table (every known token of the request), the number of computed tokens (those whose
KV entries are written), the page table and the sampling parameters. A plan carries only what changes.
"""

import math
from dataclasses import dataclass, field, fields
from enum import IntEnum
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


class Rule(IntEnum):
    """How a slot's tokens are chosen and its drafts accepted."""

    GREEDY = 0
    """argmax; a draft is accepted when it is the target's argmax."""
    COUPLED = 1
    """Shared Gumbel noise keyed by (seed, position): the text does not depend on the drafts. For seeded requests."""
    REJECTION = 2
    """The full-distribution rule of Leviathan et al. (2211.17192): the output distribution is the target's."""


class Tracing(IntEnum):
    """Whether the ranks keep spans of a step."""

    OFF = 0
    ON = 1
    SETTLED = 2
    """And wait at each span's ends until the device has done what it was given, so that spans are the device's times
    and not those of the host, which runs ahead."""


SAMPLING = np.dtype(
    [
        ("rule", "<i4"),
        ("temperature", "<f4"),  # > 0; 1 for GREEDY
        ("top_p", "<f4"),  # 1 = off
        ("top_k", "<i4"),  # 0 = off
        ("min_p", "<f4"),  # 0 = off
        ("presence_penalty", "<f4"),  # 0 = off
        ("frequency_penalty", "<f4"),  # 0 = off
        ("repetition_penalty", "<f4"),  # 1 = off
        ("prompt_tokens", "<i4"),  # tokens before this position are the prompt
        ("min_length", "<i4"),  # the slot's banned tokens may not be chosen for positions before this one
        ("logprobs", "<i4"),  # -1 = none; 0 = of the chosen token; n = and of the n likeliest
        ("prompt_logprobs", "<i4"),  # the same for the prompt's own tokens
        ("seed", "<i8"),
    ]
)


SECONDS = np.dtype(
    [
        ("wait", "<f8"),  # idle for want of this plan: from the end of the draft of the step before; 0 if it was queued
        ("verify", "<f8"),  # from taking the plan to this result
        ("verify_exposed", "<f8"),  # of it, blocked in waits for other ranks
        ("draft", "<f8"),  # the draft run of the step before
        ("draft_exposed", "<f8"),  # of it, blocked in waits for other ranks
    ]
)


def _array(dtype: str | np.dtype[Any] = "<i4", dimensions: int = 1) -> Any:
    """A dataclass field that holds an array of this dtype, empty unless given."""
    return field(default_factory=lambda: np.empty((0,) * dimensions, dtype), metadata={"dtype": np.dtype(dtype)})


class _Packed:
    """Arrays packed back to back, each at a multiple of 8 bytes, behind a header of their shapes."""

    def pack(self) -> bytes:
        """One buffer that `unpack` reads without copying."""
        arrays = [
            np.ascontiguousarray(getattr(self, each.name), dtype=each.metadata["dtype"])
            for each in fields(self)  # type: ignore[arg-type]
        ]
        header = np.array([[a.ndim, *a.shape, *([0] * (3 - a.ndim))] for a in arrays], np.int64)
        parts = [header.tobytes()]
        for array in arrays:
            data = array.tobytes()
            parts += [data, b"\0" * (-len(data) % 8)]
        return b"".join(parts)

    @classmethod
    def unpack(cls, buffer: bytes | memoryview) -> Self:
        """The arrays as read-only views of `buffer`."""
        layout = fields(cls)  # type: ignore[arg-type]
        header = np.frombuffer(buffer, np.int64, 4 * len(layout)).reshape(-1, 4)
        offset, values = header.nbytes, {}
        for each, (dimensions, *sizes) in zip(layout, header.tolist(), strict=True):
            dtype, shape = each.metadata["dtype"], tuple(sizes[:dimensions])
            count = math.prod(shape)
            values[each.name] = np.frombuffer(buffer, dtype, count, offset).reshape(shape)
            offset += -(-count * dtype.itemsize // 8) * 8
        return cls(**values)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepPlan(_Packed):
    """What the ranks do in one step. Arrays are one-dimensional int32 unless said otherwise.

    Admissions come first, then pages, then rows. A row covers the slot's next `row_tokens` tokens from its computed
    length on. A decode row has 1 + row_drafts tokens: the last known one and the drafts. A prefill row has no drafts
    and samples (row_samples) only with its last chunk.
    """

    number: NDArray[np.int64] = _array("<i8")
    """[1]: counts the steps."""
    halves: NDArray[np.int64] = _array("<i8")
    """[1]: 2 when the step runs as two micro-batches, else 1; the same on all ranks."""
    rebalance: NDArray[np.int64] = _array("<i8")
    """[1]: 1 when all ranks place the experts anew before this step, else 0."""
    draft_rounds: NDArray[np.int64] = _array("<i8")
    """[1]: the most drafts of any row on any rank: every rank runs the draft so often, with or without rows."""
    capacities: NDArray[np.int64] = _array("<i8", 2)
    """[passes, data-parallel rows]: the most tokens that each has in a half of a pass, the same on all ranks. The first
    pass is the verification (and the draft run over its batch), the others are the draft's rounds after the first."""
    traced: NDArray[np.int64] = _array("<i8")
    """[1]: a `Tracing`; the same on all ranks."""
    admitted_slot: Ints = _array()
    admitted_length: Ints = _array()
    """Known tokens of each admitted slot."""
    admitted_cached: Ints = _array()
    """How many of them are computed already: the prefix cache's pages hold them."""
    admitted_tokens: Ints = _array()
    """The known tokens, back to back."""
    admitted_sampling: NDArray[Any] = _array(SAMPLING)
    bias_slot: Ints = _array()
    """logit_bias of admitted slots: (slot, token, value) triples."""
    bias_token: Ints = _array()
    bias_value: Floats = _array("<f4")
    banned_slot: Ints = _array()
    """Tokens that admitted slots may not choose before their min_length: (slot, token) pairs."""
    banned_token: Ints = _array()
    grammar_slot: Ints = _array()
    """Admitted slots whose answer is under a grammar."""
    grammar_index: Ints = _array()
    """Which of the plan's grammars it is."""
    grammar_kind: Ints = _array()
    """Of each grammar, a GrammarKind."""
    grammar_size: Ints = _array()
    """Bytes of each grammar's text."""
    grammar_text: NDArray[np.uint8] = _array("u1")
    """The texts in UTF-8, back to back."""
    page_slot: Ints = _array()
    """New page table entries: page_table[page_slot, page_index] = page."""
    page_index: Ints = _array()
    page: Ints = _array()
    row_slot: Ints = _array()
    row_tokens: Ints = _array()
    row_drafts: Ints = _array()
    row_samples: NDArray[np.bool_] = _array("?")
    row_bound: Ints = _array()
    """The most tokens the row's slot can have computed when the step ends (an upper bound when plans are in flight)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StepResult(_Packed):
    """What one step produced, in the plan's row order. R rows, W = 1 + the plan's most drafts.

    `top_*` have as many columns as the most that any of the step's slots asked for, likeliest first; rows that did not
    ask hold zeros. Log-probabilities are the model's own (of its raw logits), natural logarithm.
    """

    number: NDArray[np.int64] = _array("<i8")
    """[1]: the plan's."""
    count: Ints = _array()
    """[R]: new tokens of each row: accepted drafts plus one; 0 for a row that does not sample."""
    tokens: Ints = _array("<i4", 2)
    """[R, W]: the new tokens, `count` of them."""
    logprob: Floats = _array("<f4", 2)
    """[R, W], or [0, 0] when no row asked."""
    top_token: Ints = _array("<i4", 3)
    """[R, W, N]."""
    top_logprob: Floats = _array("<f4", 3)
    prompt_count: Ints = _array()
    """[R] (or [0] when no row asked): prompt tokens with a log-probability in this step; a prefill row of n tokens from
    computed length c covers tokens c+1 .. c+n that are still prompt."""
    prompt_logprob: Floats = _array("<f4")
    """[sum(prompt_count)]."""
    prompt_top_token: Ints = _array("<i4", 2)
    """[sum(prompt_count), N]."""
    prompt_top_logprob: Floats = _array("<f4", 2)
    expert_tokens: NDArray[np.float64] = _array("<f8")
    """[ranks]: tokens that each rank's experts had since they were last placed; [0] when this step places none."""
    expert_imbalance: NDArray[np.float64] = _array("<f8")
    """[1], or [0]: the busiest rank's over the mean, in the layer where that is worst."""
    seconds: NDArray[Any] = _array(SECONDS)
    """[1]: where the rank's time went. On a GPU it is the host's, which runs ahead of the device."""
