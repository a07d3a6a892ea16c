"""SamplingParams: what a request asks of sampling, validated when made."""

import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any

from raysonar.errors import InvalidRequestError
from raysonar.grammar import Grammar

Prompt = str | Sequence[int]
"""A text, or token ids."""
CONTINUATION = 256
"""Tokens that the commands continue a raw prompt by unless told otherwise: it may have no end of its own."""
MAX_LOGPROBS = 100
MAX_STOPS = 256
"""Stop strings: each is looked for at every token, on the thread that serves all requests."""
RANGES: Mapping[str, tuple[float, float]] = {
    "n": (1, 128),
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),  # above 0
    "top_k": (0, 2**31 - 1),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.01, 100.0),
    "min_tokens": (0, 2**31 - 1),
    "seed": (-(2**63), 2**63 - 1),
    "max_tokens": (1, 2**31 - 1),
    "logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
}
"""Least and most of every number; those that are None by default may stay so."""
_OPTIONAL = frozenset({"seed", "max_tokens", "logprobs", "prompt_logprobs"})
SMALLEST_TEMPERATURE = 1e-5
"""Below, decoding is greedy."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Every parameter holds at every verified position of a speculative step. Names are vLLM's and OpenAI's.

    Raises InvalidRequestError, naming the field, for values out of range.
    """

    n: int = 1
    """Completions of each prompt."""
    temperature: float = 1.0
    """0 is greedy decoding."""
    top_p: float = 1.0
    top_k: int = 0
    """0 (or -1) keeps every token."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    """Over prompt and answer; the other two penalties count the answer only."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """The same seed gives the same text, with and without speculation."""
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    """Before this many tokens, end-of-sequence and stop tokens cannot be chosen, nor stop strings end the text."""
    max_tokens: int | None = None
    """None: until the model's length."""
    logprobs: int | None = None
    """0: of the chosen tokens; n: and of the n likeliest."""
    prompt_logprobs: int | None = None
    grammar: Grammar | None = None
    """What the text must match; every token that it does not allow is ruled out, whatever else is asked for."""
    skip_special_tokens: bool = True
    """Whether texts leave special tokens out."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self._collection("stop", "strings")
        object.__setattr__(self, "stop", tuple(stop))
        object.__setattr__(self, "stop_token_ids", tuple(self._collection("stop_token_ids", "token ids")))
        if not isinstance(self.logit_bias, Mapping):
            message = f"logit_bias must map token ids to numbers, got {self.logit_bias!r}"
            raise InvalidRequestError(message, "logit_bias")
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        object.__setattr__(self, "top_k", 0 if self.top_k == -1 else self.top_k)
        for name, (low, high) in RANGES.items():
            if getattr(self, name) is not None or name not in _OPTIONAL:
                self._check_range(name, low, high, above=name == "top_p")
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidRequestError(f"{name} must be true or false, got {getattr(self, name)!r}", name)
        self._check_contents()
        self._check_grammar()

    def _check_range(self, name: str, low: float, high: float, *, above: bool = False) -> None:
        value = getattr(self, name)
        whole = isinstance(low, int)
        kind = int if whole else (int, float)
        infinite = isinstance(value, float) and not math.isfinite(value)
        if isinstance(value, bool) or not isinstance(value, kind) or infinite:
            raise InvalidRequestError(f"{name} must be {'a whole' if whole else 'a'} number, got {value!r}", name)
        if not low <= value <= high or (above and value == low):
            words = f"above {low} and at most {high}" if above else f"from {low} to {high}"
            shown = repr(value) if abs(value) < 2**64 else f"a number of {int(value).bit_length()} bits"
            raise InvalidRequestError(f"{name} must be {words}, got {shown}", name)

    def _collection(self, name: str, contents: str) -> Sequence[object]:
        value = getattr(self, name)
        if isinstance(value, str) or not isinstance(value, Sequence | Set):
            raise InvalidRequestError(f"{name} must be a list of {contents}, got {value!r}", name)
        return list(value)

    def _check_contents(self) -> None:
        if any(not isinstance(text, str) or not text for text in self.stop):
            raise InvalidRequestError(f"stop must be non-empty strings, got {self.stop!r}", "stop")
        if len(self.stop) > MAX_STOPS:
            raise InvalidRequestError(f"stop must be at most {MAX_STOPS} strings, got {len(self.stop)}", "stop")
        if not all(_is_token(token) for token in self.stop_token_ids):
            message = f"stop_token_ids must be token ids, got {self.stop_token_ids!r}"
            raise InvalidRequestError(message, "stop_token_ids")
        object.__setattr__(self, "stop_token_ids", tuple(dict.fromkeys(self.stop_token_ids)))
        for token, bias in self.logit_bias.items():
            number = isinstance(bias, int | float) and not isinstance(bias, bool)
            if not _is_token(token) or not number or not -100 <= bias <= 100:
                raise InvalidRequestError(
                    f"logit_bias must map token ids to numbers from -100 to 100, got {token!r}: {bias!r}", "logit_bias"
                )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens ({self.min_tokens}) must not be more than max_tokens ({self.max_tokens})", "min_tokens"
            )

    def _check_grammar(self) -> None:
        if self.grammar is None:
            return
        if not isinstance(self.grammar, Grammar):
            raise InvalidRequestError(f"grammar must be a Grammar, got {self.grammar!r}", "grammar")
        if self.ignore_eos:
            message = f"ignore_eos cannot be asked for with {self.grammar.field}: the grammar says where the text ends"
            raise InvalidRequestError(message, "ignore_eos")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always chosen: at temperature 0, or so near that logits divided overflow."""
        return self.temperature < SMALLEST_TEMPERATURE


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def paired(
    prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams]]:
    """Each prompt with its parameters; None stands for the defaults. Raises InvalidRequestError."""
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
    each: list[Any] = [prompts] if single else list(prompts)
    if params is None or isinstance(params, SamplingParams):
        return [(prompt, params or SamplingParams()) for prompt in each]
    if len(params) != len(each):
        raise InvalidRequestError(f"{len(each)} prompts came with {len(params)} params; give one, or one each")
    return list(zip(each, params, strict=True))
