"""A request and its answers: what was asked, checked before it is queued, and how far it has come."""

import itertools
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from raysonar.driver.outputs import Acceptance, Delta, TokenLogprob
from raysonar.driver.params import SamplingParams
from raysonar.errors import InvalidRequestError, RaysonarError
from raysonar.observe.answers import Moments
from raysonar.step import SAMPLING, Ints, Rule

Sink = Callable[[Delta | RaysonarError], None]
"""Takes a request's news, on the engine's thread; must not block."""

_arrivals = itertools.count()


@dataclass(frozen=True)
class Progress:
    """How far a request had come with an engine that is gone, its first delta included: it goes on behind that."""

    tokens: tuple[tuple[int, ...], ...]
    """Each answer's, as far as they were given out."""
    finished: frozenset[int] = frozenset()
    """Places of the answers that have ended."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the rank's model and cache can take."""

    vocab: int
    max_model_len: int
    pages: int
    page_size: int
    eos_token_ids: frozenset[int]

    @property
    def cache_tokens(self) -> int:
        """The longest request that the pages hold: its last token is never computed, so it needs no place."""
        return self.pages * self.page_size + 1

    @property
    def tokens(self) -> int:
        """The longest request: prompt and answer."""
        return min(self.max_model_len, self.cache_tokens)


@dataclass(eq=False, kw_only=True)
class Answer:
    """One of a request's n answers."""

    request: "Request" = field(repr=False)
    index: int
    seed: int
    limit: int
    """Tokens of prompt and answer at the most."""
    tokens: Ints
    """Every known token while it waits; while it runs, its slot knows more."""
    priority: int = 0
    """Lower values are served first."""
    prompt_logprobs: list[TokenLogprob | None] | None = None
    """Those that are in, in order; None when not asked for."""
    arrival: int = field(default_factory=lambda: next(_arrivals))
    keys: list[bytes] = field(default_factory=list)
    """Page keys of its leading tokens, as far as they were needed yet."""
    data_rank: int = 0
    """The data-parallel row that it runs on."""
    slot: int = -1
    """-1 while it does not run."""
    cached_tokens: int = 0
    """Tokens of the prompt that the prefix cache held when it was first admitted."""
    admissions: int = 0
    acceptance: Acceptance = Acceptance()
    """Up to the last time it left its slot."""
    finished: bool = False
    moments: Moments = field(default_factory=Moments)

    @property
    def order(self) -> tuple[int, int]:
        """Who comes first: the lower priority value, then the earlier arrival."""
        return self.priority, self.arrival

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """Whether its prompt must be computed, not found in the prefix cache, for its log-probabilities."""
        return self.prompt_logprobs is not None and len(self.prompt_logprobs) < len(self.request.prompt_token_ids)

    def rewind(self, tokens: int) -> None:
        """Know the first `tokens` tokens only; it does not run."""
        if tokens < len(self.tokens):
            self.tokens = self.tokens[:tokens]
            self.keys.clear()

    def sampling(self) -> NDArray[Any]:
        """Its parameters as the rank takes them: [] of SAMPLING."""
        params, prompt_tokens = self.request.params, len(self.request.prompt_token_ids)
        rule = Rule.GREEDY if params.greedy else Rule.REJECTION if params.seed is None else Rule.COUPLED
        record = np.zeros((), SAMPLING)
        record["rule"] = rule
        record["temperature"] = 1.0 if params.greedy else params.temperature
        record["top_p"] = 1.0 if params.greedy else params.top_p
        record["top_k"] = 0 if params.greedy else params.top_k
        record["min_p"] = 0.0 if params.greedy else params.min_p
        record["presence_penalty"] = params.presence_penalty
        record["frequency_penalty"] = params.frequency_penalty
        record["repetition_penalty"] = params.repetition_penalty
        record["prompt_tokens"] = prompt_tokens
        record["min_length"] = prompt_tokens + params.min_tokens if params.min_tokens else 0
        record["logprobs"] = -1 if params.logprobs is None else params.logprobs
        record["prompt_logprobs"] = params.prompt_logprobs if self.awaits_prompt_logprobs else -1
        record["seed"] = self.seed
        return record


@dataclass(eq=False, kw_only=True)
class Request:
    """A checked request."""

    id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    banned: tuple[int, ...]
    """Tokens that may not be chosen before min_tokens."""
    sink: Sink
    answers: list[Answer] = field(default_factory=list)
    started: bool = False
    """Whether its first delta is out."""

    @property
    def queued(self) -> list[Answer]:
        """The answers that have been queued: before the first delta is out, only the first."""
        return self.answers if self.started else self.answers[:1]

    @property
    def finished(self) -> bool:
        """Whether every answer is."""
        return all(answer.finished for answer in self.answers)


def make_request(
    *,
    request_id: str,
    prompt: str | None,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    limits: Limits,
    sink: Sink,
    priority: int = 0,
    progress: Progress | None = None,
) -> Request:
    """Check a request against the model and make its answers. Raises InvalidRequestError, naming the field."""
    if isinstance(priority, bool) or not isinstance(priority, int) or not -(2**31) <= priority < 2**31:
        raise InvalidRequestError(f"priority must be a whole number of 32 bits, got {priority!r}", "priority")
    check_tokens("prompt", prompt_token_ids, limits.vocab)
    check_tokens("stop_token_ids", params.stop_token_ids, limits.vocab)
    check_tokens("logit_bias", params.logit_bias, limits.vocab)
    for name, wanted in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if wanted is not None and wanted > limits.vocab:
            raise InvalidRequestError(f"{name} is {wanted}, the vocabulary has {limits.vocab} tokens", name)
    limit = _length_limit(len(prompt_token_ids), params.max_tokens, limits)
    if params.min_tokens > (room := limit - len(prompt_token_ids)):
        message = f"min_tokens is {params.min_tokens}, the answer to this prompt has at most {room} tokens"
        raise InvalidRequestError(message, "min_tokens")
    ending = {*params.stop_token_ids, *(() if params.ignore_eos else limits.eos_token_ids)}
    if params.min_tokens and len(ending) == limits.vocab:
        message = "every token would end the answer, so there is none to choose before min_tokens"
        raise InvalidRequestError(message, "stop_token_ids")
    request = Request(
        id=request_id,
        prompt=prompt,
        prompt_token_ids=[int(token) for token in prompt_token_ids],
        params=params,
        banned=tuple(sorted(ending)) if params.min_tokens else (),
        sink=sink,
    )
    tokens = np.array(request.prompt_token_ids, np.int32)
    for index in range(params.n):
        wants_prompt = params.prompt_logprobs is not None and index == 0
        request.answers.append(
            Answer(
                request=request,
                index=index,
                seed=_seed(params.seed, index),
                limit=limit,
                tokens=tokens,
                priority=priority,
                prompt_logprobs=[None] if wants_prompt else None,
            )
        )
    if progress is not None:
        _go_on(request, progress, limits)
    return request


def _go_on(request: Request, progress: Progress, limits: Limits) -> None:
    """Let a new request be as far as an earlier one was."""
    if len(progress.tokens) != len(request.answers):
        message = f"the progress is of {len(progress.tokens)} answers, {len(request.answers)} are asked for"
        raise InvalidRequestError(message, "progress")
    if progress.finished >= set(range(len(request.answers))):
        raise InvalidRequestError("all answers have ended, there is nothing to go on with", "progress")
    request.started = True
    for answer, tokens in zip(request.answers, progress.tokens, strict=True):
        check_tokens("progress", tokens, limits.vocab)
        answer.finished = answer.index in progress.finished
        answer.prompt_logprobs = None  # they came with the first delta
        answer.tokens = np.concatenate((answer.tokens, np.array(tokens, np.int32)))
        if not answer.finished and len(answer.tokens) >= answer.limit:
            message = f"an answer of {len(tokens)} tokens is as long as it may be, and is said to go on"
            raise InvalidRequestError(message, "progress")


def check_tokens(field_name: str, tokens: Iterable[int], vocab: int) -> None:
    """Raises InvalidRequestError, naming the field, for what is no token id of the model."""
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int | np.integer):
            raise InvalidRequestError(f"{field_name} must hold token ids, got {token!r}", field_name)
        if not 0 <= token < vocab:
            message = f"{field_name} holds token id {token}; the model's ids go from 0 to {vocab - 1}"
            raise InvalidRequestError(message, field_name)


def _length_limit(prompt: int, max_tokens: int | None, limits: Limits) -> int:
    """Tokens of prompt and answer at the most."""
    if limits.max_model_len <= limits.cache_tokens:
        room = f"the model takes {limits.max_model_len} of prompt and answer together"
    else:
        held = f"{limits.pages} pages of {limits.page_size}"
        room = f"the KV cache ({held}) holds {limits.cache_tokens} of prompt and answer together"
    if not prompt:
        raise InvalidRequestError("the prompt is empty; it must have at least one token", "prompt")
    if prompt + 1 > limits.tokens:
        raise InvalidRequestError(f"the prompt has {prompt} tokens, {room}, and an answer needs at least one", "prompt")
    if max_tokens is None:
        return limits.tokens
    if prompt + max_tokens > limits.tokens:
        message = f"the prompt has {prompt} tokens and max_tokens is {max_tokens}, {prompt + max_tokens} in all; {room}"
        raise InvalidRequestError(message, "max_tokens")
    return prompt + max_tokens


def _seed(seed: int | None, index: int) -> int:
    """The answer's own seed, a signed 64-bit number; drawn from the operating system when none is asked for."""
    if seed is None:
        return secrets.randbits(63)
    return (seed + index + 2**63) % 2**64 - 2**63
