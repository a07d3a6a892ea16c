"""What /v1/completions and /v1/chat/completions take: OpenAI's parameters, and vLLM's further sampling parameters.

A parameter that is unknown, or known and not supported, is refused by name. JSON's null stands for "not given".
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, GetJsonSchemaHandler, PlainValidator, WithJsonSchema, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from raysonar.driver.params import MAX_STOPS, RANGES, SamplingParams
from raysonar.errors import InvalidRequestError
from raysonar.serving.body import Body, refused, wrong
from raysonar.serving.generation import Prompt
from raysonar.serving.messages import (
    Function,
    Message,
    NamedFunction,
    TemplateVariables,
    Tool,
    ToolChoice,
    chat_of,
    check_continuation,
)
from raysonar.serving.structured import StructuredBody

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat answer may run to the model's length."""

MAX_PROMPTS = 2048

_PASSED = (
    "n temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty logit_bias seed stop "
    "stop_token_ids include_stop_str_in_output ignore_eos min_tokens prompt_logprobs skip_special_tokens"
).split()
"""Parameters that reach SamplingParams as they are."""

_RANGED_AS = {"top_logprobs": "logprobs", "max_completion_tokens": "max_tokens"}

_IGNORED = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})
"""Labels: an answer does not depend on them."""

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "spaces_between_special_tokens": (False,),
    "store": (False,),
    "suffix": ("",),
    "verbosity": (),
    "web_search_options": (),
}
"""Parameters that are not supported, each with the values that ask for nothing."""

_TOKENS = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
_PROMPT_SCHEMA = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": {"type": "string"}},
        _TOKENS,
        {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS, "items": _TOKENS},
    ]
}
_STOP_STRING = {"type": "string", "minLength": 1}
_STOP_SCHEMA = {"anyOf": [_STOP_STRING, {"type": "array", "maxItems": MAX_STOPS, "items": _STOP_STRING}]}
_BIAS_SCHEMA = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]+$"},
    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
}


def _tokens_of(value: object) -> list[int] | None:
    """`value` when it is a non-empty list of token ids."""
    if isinstance(value, list) and value and all(type(item) is int and item >= 0 for item in value):
        return value
    return None


def _prompts(value: object) -> list[str | list[int]]:
    """The four shapes of `prompt` as one list of prompts."""
    if isinstance(value, str):
        return [value]
    if (tokens := _tokens_of(value)) is not None:
        return [tokens]
    if isinstance(value, list) and 0 < len(value) <= MAX_PROMPTS:
        prompts = [item if isinstance(item, str) else _tokens_of(item) for item in value]
        if all(prompt is not None for prompt in prompts) and len({type(prompt) for prompt in prompts}) == 1:
            return [prompt for prompt in prompts if prompt is not None]
    raise wrong(
        "it must be a string, a list of strings, a list of token ids, or a list of lists of token ids; "
        f"none of the lists empty, and at most {MAX_PROMPTS} prompts"
    )


def _stop(value: object) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, list) or not all(isinstance(item, str) for item in strings):
        raise wrong("it must be a string or a list of strings")
    return tuple(strings)


def _bias(value: object) -> dict[int, float]:
    """{"token id": bias}, as JSON has it."""
    if isinstance(value, dict) and all(
        token.isascii() and token.isdigit() and type(bias) in (int, float) for token, bias in value.items()
    ):
        return {int(token): bias for token, bias in value.items()}
    raise wrong("it must map token ids to numbers from -100 to 100")


class StreamOptions(Body):
    """How a stream ends."""

    include_usage: bool = False


class GenerationBody(StructuredBody, ABC):
    """What both endpoints take. None stands for SamplingParams' own default."""

    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_bias), WithJsonSchema(_BIAS_SCHEMA)] | None = None
    seed: int | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_stop), WithJsonSchema(_STOP_SCHEMA)] | None = None
    stop_token_ids: list[Annotated[int, Field(ge=0)]] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    max_tokens: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    return_token_origins: bool = False
    """Says of each token where it comes from; a stream then has an event a token."""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    """Lower values are served first."""
    timeout: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Seconds after which the request is stopped, if it is not answered."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, values: object) -> object:
        if not isinstance(values, dict):
            return values
        for name in _NEUTRAL.keys() & values.keys():
            if not any(_same(values[name], neutral) for neutral in (None, *_NEUTRAL[name])):
                raise refused(name, f"{name} is not supported by this server", "unsupported_parameter")
        return {name: value for name, value in values.items() if name not in _NEUTRAL and name not in _IGNORED}

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """With the ranges of numbers, and the parameters that are looked at before the fields are."""
        schema = super().__get_pydantic_json_schema__(core, handler)
        properties = schema["properties"]
        for name, ranged in ({name: name for name in RANGES} | _RANGED_AS).items():
            numbers = properties.get(name, {}).get("anyOf", [{}])[0]
            if numbers.get("type") not in ("integer", "number"):
                continue
            low, high = RANGES[ranged]
            lowest = "exclusiveMinimum" if name == "top_p" else "minimum"
            numbers |= {lowest: -1 if name == "top_k" else low, "maximum": high}
        for name, neutral in _NEUTRAL.items():
            properties.setdefault(name, {"enum": [None, *neutral]})
        for name in sorted(_IGNORED):
            properties.setdefault(name, {})
        return schema

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refused("stream_options", "stream_options needs stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise refused("prompt_logprobs", "prompt_logprobs is not supported with stream=true")
        return self

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk that has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    @abstractmethod
    def prompts(self) -> list[Prompt]:
        """What to continue."""

    @abstractmethod
    def sampling(self) -> SamplingParams:
        """Raises InvalidRequestError, naming the parameter as the client spelt it."""

    @property
    def needs_vocabulary(self) -> bool:
        """Whether tokens have to be spelt in the answer."""
        return self.prompt_logprobs is not None

    def _given(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in _PASSED}
        values["grammar"] = self.grammar()
        return {name: value for name, value in values.items() if value is not None}


def _same(value: object, other: object) -> bool:
    """Equal as JSON: true is not 1."""
    return type(value) is type(other) and value == other


class CompletionBody(GenerationBody):
    """/v1/completions."""

    prompt: Annotated[list[str | list[int]], PlainValidator(_prompts), WithJsonSchema(_PROMPT_SCHEMA)]
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise refused("best_of", "best_of is not supported, unless it equals n", "unsupported_parameter")
        return self

    @property
    def prompts(self) -> list[Prompt]:
        return list(self.prompt)

    @property
    def needs_vocabulary(self) -> bool:
        return self.echo or self.logprobs is not None or super().needs_vocabulary

    def sampling(self) -> SamplingParams:
        values = self._given()
        values["max_tokens"] = COMPLETION_MAX_TOKENS if self.max_tokens is None else self.max_tokens
        values["logprobs"] = self.logprobs
        if self.echo and self.logprobs is not None and self.prompt_logprobs is None:
            values["prompt_logprobs"] = self.logprobs
        return SamplingParams(**values)


class ChatBody(GenerationBody):
    """/v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    tools: list[Tool] = []  # noqa: RUF012
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    """False: at most one call; of an answer that is not held to any, the first is passed on."""
    include_reasoning: bool = True
    """False leaves the reasoning out of the answer."""
    add_generation_prompt: bool | None = None
    """None: unless the last message is continued."""
    continue_final_message: bool = False
    chat_template_kwargs: TemplateVariables = {}  # noqa: RUF012

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise refused("top_logprobs", "top_logprobs needs logprobs=true")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise refused("max_tokens", "max_tokens and max_completion_tokens must not differ; give one of them")
        check_continuation(self)
        if self.forces_call and not self.callable:
            wanted = self.tool_choice.name if isinstance(self.tool_choice, NamedFunction) else "any function"
            raise refused("tool_choice", f"tool_choice cannot be kept to: tools does not have {wanted}")
        if self.calls_tools and self.asked:
            message = f"{self.asked[0]} cannot be kept to by an answer that may call functions; set tool_choice to none"
            raise refused(self.asked[0], message)
        return self

    @property
    def prompts(self) -> list[Prompt]:
        return [chat_of(self, self.tools if self.calls_tools else [])]

    @property
    def calls_tools(self) -> bool:
        """Whether the answer may hold function calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forces_call(self) -> bool:
        """Whether the answer has to be a call."""
        return self.tool_choice not in ("auto", "none")

    @property
    def callable(self) -> list[tuple[int, Function]]:
        """What may be called, each with its place in `tools`."""
        choice = self.tool_choice
        functions = [(place, tool.function) for place, tool in enumerate(self.tools) if choice != "none"]
        return [each for each in functions if not isinstance(choice, NamedFunction) or each[1].name == choice.name]

    @property
    def calls_many(self) -> bool:
        """Whether the answer may hold more than one call."""
        return self.parallel_tool_calls and not isinstance(self.tool_choice, NamedFunction)

    @property
    def holds_calls(self) -> bool:
        """Whether calls are held to their format and to what is declared of their functions."""
        return self.forces_call or any(function.strict for _, function in self.callable)

    @property
    def needs_vocabulary(self) -> bool:
        return self.logprobs or super().needs_vocabulary

    def sampling(self) -> SamplingParams:
        values = self._given()
        limit = self.max_completion_tokens if self.max_tokens is None else self.max_tokens
        values |= {"max_tokens": limit, "logprobs": (self.top_logprobs or 0) if self.logprobs else None}
        spelt = {"logprobs": "top_logprobs"}
        if self.max_tokens is None:
            spelt["max_tokens"] = "max_completion_tokens"
        try:
            return SamplingParams(**values)
        except InvalidRequestError as error:
            field = spelt.get(error.field or "", error.field)
            raise InvalidRequestError(str(error).replace(error.field or "", field or ""), field) from error
