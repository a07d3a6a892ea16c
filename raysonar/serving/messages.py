"""The conversation of a chat request: messages and tools as OpenAI has them, and as a chat template takes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, GetJsonSchemaHandler, PlainValidator, WithJsonSchema, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from raysonar.serving.body import Body, refused, wrong
from raysonar.serving.generation import Chat

_TEXT_PARTS = {
    "type": "array",
    "minItems": 1,
    "items": {
        "type": "object",
        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
        "required": ["type", "text"],
    },
}


def _content(value: object) -> str:
    """A string, or parts of text joined."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        for part in value:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or not isinstance(part.get("text"), str):
                raise wrong(f"only parts of type 'text' are supported, each with its 'text', not {kind!r}")
        return "".join(part["text"] for part in value)
    raise wrong("it must be a string or a list of text parts")


Content = Annotated[str, PlainValidator(_content), WithJsonSchema({"anyOf": [{"type": "string"}, _TEXT_PARTS]})]


_PARSED = ("parsed", "parsed_arguments")
"""What OpenAI's parsing helpers put beside a text that they parsed; the text is what counts."""
_EMPTY = ("refusal", "audio", "function_call", "annotations")
"""What messages may have, as long as there is nothing in it."""


def _without(values: object, names: Sequence[str]) -> object:
    if not isinstance(values, dict):
        return values
    return {name: value for name, value in values.items() if name not in names}


class CalledFunction(Body):
    """The name and the arguments of a call, as the model wrote them."""

    name: str
    arguments: str = "{}"

    @model_validator(mode="before")
    @classmethod
    def _drop_parsed(cls, values: object) -> object:
        return _without(values, _PARSED)

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = super().__get_pydantic_json_schema__(core, handler)
        schema["properties"] |= {name: {} for name in _PARSED}
        return schema


class ToolCall(Body):
    """A call that the model made earlier in the conversation."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None
    """Streams have it; clients that put a message together from one send it back."""


_SAYS = {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}}
_CALLS = {"required": ["tool_calls"], "properties": {"tool_calls": {"type": "array", "minItems": 1}}}


def _of(*roles: str, without: Sequence[str]) -> dict[str, Any]:
    """The schema of messages of some roles, which do not have some parameters."""
    return {"properties": {"role": {"enum": list(roles)}} | {name: {"type": "null"} for name in without}}


_ROLES = [
    {"allOf": [_SAYS, _of("system", "developer", "user", without=("tool_calls", "reasoning_content", "tool_call_id"))]},
    {"allOf": [_SAYS, _of("tool", without=("tool_calls", "reasoning_content"))]},
    {"allOf": [{"anyOf": [_SAYS, _CALLS]}, _of("assistant", without=("tool_call_id",))]},
]
"""What `Message._check` demands."""


class Message(Body):
    """One message."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    tool_calls: list[ToolCall] | None = None
    """Of an assistant's."""
    tool_call_id: str | None = None
    """Of a tool's: which call it answers."""
    reasoning_content: str | None = None
    """Of an assistant's; DeepSeek's templates leave it out."""

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = super().__get_pydantic_json_schema__(core, handler)
        schema["properties"] |= {name: {"enum": [None, []]} for name in _EMPTY} | {name: {} for name in _PARSED}
        return schema | {"anyOf": _ROLES}

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, values: object) -> object:
        """What OpenAI's client sends of an assistant's message that it got, where there is nothing in it."""
        if not isinstance(values, dict):
            return values
        empty = [name for name in _EMPTY if values.get(name) in (None, [])]
        return _without(values, (*empty, *_PARSED))

    @model_validator(mode="after")
    def _check(self) -> "Message":
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise refused(
                "content", f"content is required in a message of the {self.role}", "missing_required_parameter"
            )
        for name in ("tool_calls", "reasoning_content"):
            if getattr(self, name) is not None and self.role != "assistant":
                raise refused(name, f"{name} belongs to messages of the assistant, not of the {self.role}")
        if self.tool_call_id is not None and self.role != "tool":
            raise refused("tool_call_id", f"tool_call_id belongs to messages of a tool, not of the {self.role}")
        return self

    @property
    def plain(self) -> dict[str, Any]:
        """For the chat template, which knows a developer as the system."""
        values = self.model_dump(exclude_none=True, exclude={"tool_calls": {"__all__": {"index"}}})
        if not self.tool_calls:
            values.pop("tool_calls", None)
        return values | {"role": "system" if self.role == "developer" else self.role}


class Function(Body):
    """What the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema."""
    strict: bool | None = None
    """Whether arguments are held to the schema; None: where a call is forced."""


class Tool(Body):
    """A function."""

    type: Literal["function"]
    function: Function

    @property
    def plain(self) -> dict[str, Any]:
        """For the chat template, as it was sent."""
        return self.model_dump(exclude_none=True)


@dataclass(frozen=True)
class NamedFunction:
    """A tool_choice: exactly one call, of this function."""

    name: str


_CHOICES = ("auto", "none", "required")
_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": list(_CHOICES)},
        {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "properties": {"name": {"type": "string"}},
                    "required": ["name"],
                    "additionalProperties": False,
                },
            },
            "required": ["type", "function"],
            "additionalProperties": False,
        },
    ]
}


def _choice(value: object) -> str | NamedFunction:
    if isinstance(value, str) and value in _CHOICES:
        return value
    match value:
        case {"type": "function", "function": {"name": str(name), **more}, **others} if not more and not others:
            return NamedFunction(name)
    raise wrong(f"""it must be one of {", ".join(_CHOICES)}, or {{"type": "function", "function": {{"name": NAME}}}}""")


ToolChoice = Annotated[
    Literal["auto", "none", "required"] | NamedFunction, PlainValidator(_choice), WithJsonSchema(_CHOICE_SCHEMA)
]


RESERVED = frozenset(
    "messages tools documents add_generation_prompt continue_final_message chat_template tokenize".split()
)
"""What chat_template_kwargs cannot set: it comes from other parameters, or from the model's folder."""


def _variables(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong("it must be an object of variables for the chat template")
    if taken := sorted(RESERVED & value.keys()):
        raise wrong(f"it cannot set {', '.join(taken)}")
    return value


TemplateVariables = Annotated[
    dict[str, Any],
    PlainValidator(_variables),
    WithJsonSchema({"type": "object", "propertyNames": {"not": {"enum": sorted(RESERVED)}}}),
]


class Conversation(Protocol):
    """What a body says of how its messages are written."""

    @property
    def messages(self) -> list[Message] | None: ...
    @property
    def add_generation_prompt(self) -> bool | None: ...
    @property
    def continue_final_message(self) -> bool: ...
    @property
    def chat_template_kwargs(self) -> dict[str, Any]: ...


def check_continuation(body: Conversation) -> None:
    """Raises the fault of a conversation whose end is asked for in two ways."""
    if body.continue_final_message and body.add_generation_prompt:
        raise refused("add_generation_prompt", "add_generation_prompt and continue_final_message exclude each other")


def chat_of(body: Conversation, tools: Sequence[Tool]) -> Chat:
    """For the driver, which has the chat template."""
    prompted = not body.continue_final_message if body.add_generation_prompt is None else body.add_generation_prompt
    return Chat(
        tuple(message.plain for message in body.messages or ()),
        tools=tuple(tool.plain for tool in tools),
        add_generation_prompt=prompted,
        continue_final_message=body.continue_final_message,
        variables=body.chat_template_kwargs,
    )
