"""What /tokenize and /detokenize take: vLLM's shapes."""

from typing import Annotated, Self

from pydantic import Field, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from raysonar.serving.body import Body, refused
from raysonar.serving.generation import Prompt
from raysonar.serving.messages import Message, TemplateVariables, Tool, chat_of, check_continuation


class TokenizeBody(Body):
    """A prompt, or messages for the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    """What the tokenizer adds around a text: added to a prompt unless this is false, never to messages."""
    return_token_strs: bool = False
    tools: list[Tool] = []  # noqa: RUF012
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: TemplateVariables = {}  # noqa: RUF012

    @classmethod
    def __get_pydantic_json_schema__(cls, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """With the rule that there is one of the two."""
        schema = super().__get_pydantic_json_schema__(core, handler)
        absent: dict[str, object] = {"type": "null"}
        schema["oneOf"] = [
            {"required": ["prompt"], "properties": {"prompt": {"type": "string"}, "messages": absent}},
            {"required": ["messages"], "properties": {"messages": {"type": "array"}, "prompt": absent}},
        ]
        return schema

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise refused("prompt", "give either prompt or messages")
        if self.messages is None:
            for name in ("tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
                if getattr(self, name):
                    raise refused(name, f"{name} needs messages")
        elif self.add_special_tokens:
            raise refused("add_special_tokens", "add_special_tokens: the chat template writes all special tokens")
        check_continuation(self)
        return self

    @property
    def text(self) -> Prompt:
        """For the driver."""
        return chat_of(self, self.tools) if self.prompt is None else self.prompt


class DetokenizeBody(Body):
    """Token ids."""

    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0)]]
