"""Structured output as clients ask for it: OpenAI's response_format, vLLM's structured_outputs and guided_*."""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from raysonar.errors import InvalidRequestError
from raysonar.grammar import Grammar
from raysonar.serving.body import Body, wrong

JsonSchema = dict[str, Any]
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1)]


class Text(Body):
    """Anything."""

    type: Literal["text"]


class JsonObject(Body):
    """Any JSON object."""

    type: Literal["json_object"]

    def grammar(self) -> Grammar:
        """What the text must match."""
        return Grammar.json_object("response_format")


class NamedSchema(Body):
    """A JSON Schema; it is kept to whatever `strict` says."""

    name: str
    description: str | None = None
    schema_: JsonSchema = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """JSON that is valid under a schema."""

    type: Literal["json_schema"]
    json_schema: NamedSchema

    def grammar(self) -> Grammar:
        """What the text must match. Raises InvalidRequestError."""
        return Grammar.json_schema(self.json_schema.schema_, "response_format")


ResponseFormat = Annotated[Text | JsonObject | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(Body):
    """vLLM's: exactly one of these."""

    json_: JsonSchema | str | None = Field(None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar_: str | None = Field(None, alias="grammar")

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if sum(value is not None for _, value in self) != 1:
            raise wrong("give exactly one of json, json_object, regex, choice, grammar")
        return self

    def grammar(self, field: str = "structured_outputs") -> Grammar:
        """What the text must match. Raises InvalidRequestError."""
        if self.json_ is not None:
            return Grammar.json_schema(self.json_, field)
        if self.regex is not None:
            return Grammar.regex(self.regex, field)
        if self.choice is not None:
            return Grammar.choice(self.choice, field)
        if self.grammar_ is not None:
            return Grammar.ebnf(self.grammar_, field)
        return Grammar.json_object(field)


class StructuredBody(Body):
    """The parameters that ask for structured output; at most one of them."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @property
    def asked(self) -> list[str]:
        """Those that ask for something."""
        names = [name for name in StructuredBody.model_fields if getattr(self, name) is not None]
        return [name for name in names if not isinstance(getattr(self, name), Text)]

    def grammar(self) -> Grammar | None:
        """What the answer's text must match. Raises InvalidRequestError, naming the parameter."""
        if not self.asked:
            return None
        first, *others = self.asked
        if others:
            raise InvalidRequestError(f"{others[0]}: there is {first} already; give one of them", others[0])
        value = getattr(self, first)
        if isinstance(value, JsonObject | JsonSchemaFormat | StructuredOutputs):
            return value.grammar()
        return StructuredOutputs.model_validate({first.removeprefix("guided_"): value}).grammar(first)
