"""The shapes of answers, as the published schema has them."""

from typing import Any, Literal, NotRequired

from pydantic import ConfigDict, with_config
from typing_extensions import TypedDict

from raysonar.driver.outputs import Origin
from raysonar.observe.steps import StepRecord

_closed = with_config(ConfigDict(extra="forbid"))
FinishReason = Literal["stop", "length", "tool_calls", "abort"]


@_closed
class ErrorBody(TypedDict):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str | None


@_closed
class Error(TypedDict):
    """OpenAI's error object."""

    error: ErrorBody


@_closed
class Model(TypedDict):
    """A model."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


@_closed
class ModelList(TypedDict):
    """All models."""

    object: Literal["list"]
    data: list[Model]


@_closed
class Status(TypedDict):
    """A probe's answer."""

    status: str


@_closed
class PromptTokensDetails(TypedDict):
    """Of a prompt's tokens, those that the prefix cache held."""

    cached_tokens: int


@_closed
class CompletionTokensDetails(TypedDict):
    """Of an answer's tokens, those of its reasoning; and draft tokens that were accepted and rejected."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


@_closed
class Usage(TypedDict):
    """Tokens of a request, over all its prompts and completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


@_closed
class PromptLogprob(TypedDict):
    """vLLM's entry of a prompt token."""

    logprob: float
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


@_closed
class CompletionLogprobs(TypedDict):
    """One entry a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


@_closed
class CompletionChoice(TypedDict):
    """A completion, or in a stream a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_origins: NotRequired[list[Origin]]
    prompt_logprobs: NotRequired[PromptLogprobs]


@_closed
class Completion(TypedDict):
    """/v1/completions' answer, and each event of its stream."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]


@_closed
class TopLogprob(TypedDict):
    """A token that might have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


@_closed
class TokenLogprob(TopLogprob):
    """A chosen token."""

    top_logprobs: list[TopLogprob]


@_closed
class ChatLogprobs(TypedDict):
    """One entry a token."""

    content: list[TokenLogprob]
    refusal: None


@_closed
class WholeFunction(TypedDict):
    """What is called, and with what: JSON text as the model wrote it."""

    name: str
    arguments: str


@_closed
class WholeCall(TypedDict):
    """A call."""

    id: str
    type: Literal["function"]
    function: WholeFunction


@_closed
class AssistantMessage(TypedDict):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str | None]
    tool_calls: NotRequired[list[WholeCall]]


@_closed
class ChatChoice(TypedDict):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_origins: NotRequired[list[Origin]]
    prompt_logprobs: NotRequired[PromptLogprobs]


@_closed
class ChatCompletion(TypedDict):
    """/v1/chat/completions' answer."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


@_closed
class FunctionDelta(TypedDict):
    """A call's first piece has the name, the others more of the arguments."""

    name: NotRequired[str]
    arguments: str


@_closed
class CallDelta(TypedDict):
    """A piece of a call."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


@_closed
class ChatDelta(TypedDict):
    """A piece of an answer."""

    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CallDelta]]


@_closed
class ChatChunkChoice(TypedDict):
    """A piece of a choice."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | None
    token_origins: NotRequired[list[Origin]]


@_closed
class ChatCompletionChunk(TypedDict):
    """An event of /v1/chat/completions' stream."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


@_closed
class Tokens(TypedDict):
    """/tokenize's answer."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


@_closed
class Detokenized(TypedDict):
    """/detokenize's answer."""

    prompt: str


@_closed
class ReplicaSteps(TypedDict):
    """The last steps of one engine, oldest first."""

    replica: str
    steps: list[StepRecord]


@_closed
class StepList(TypedDict):
    """The last steps of every engine."""

    object: Literal["list"]
    data: list[ReplicaSteps]


@_closed
class Trace(TypedDict):
    """A trace in Chrome's format."""

    traceEvents: list[dict[str, Any]]
    displayTimeUnit: Literal["ms"]


PUBLISHED: dict[str, Any] = {
    shape.__name__: shape
    for shape in (
        Error,
        Model,
        ModelList,
        Status,
        Completion,
        ChatCompletion,
        ChatCompletionChunk,
        Tokens,
        Detokenized,
        StepList,
        Trace,
    )
}
"""The outermost shapes by name."""
