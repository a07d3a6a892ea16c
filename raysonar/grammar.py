"""What an answer's text must match: a JSON Schema, a regular expression, a list of choices, a grammar, or a structure
of them."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Self

from raysonar.errors import InvalidRequestError
from raysonar.forms import Form
from raysonar.json_schema import check_schema

MAX_BYTES = 64 << 10
"""Of a grammar's text: compiling takes time and memory, on every rank."""


class GrammarKind(IntEnum):
    """What a grammar's text is written in."""

    JSON_SCHEMA = 0
    REGEX = 1
    """It must match the whole text, with or without ^ and $."""
    EBNF = 2
    """GBNF, as llama.cpp and vLLM take it; the rule `root` is the text."""
    STRUCTURE = 3
    """A Form, as JSON."""


@dataclass(frozen=True)
class Grammar:
    """Made by one of its constructors, which check it; what depends on the vocabulary is checked with the request."""

    kind: GrammarKind
    text: str
    field: str = field(default="grammar", compare=False)
    """The parameter that asked for it, for errors."""

    def __post_init__(self) -> None:
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError as error:
            raise self.refusal(f"it is not valid Unicode: {error}") from error
        if size > MAX_BYTES:
            raise self.refusal(f"it has {size} bytes, at most {MAX_BYTES} are taken")

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str, field: str = "grammar") -> Self:
        """JSON that is valid under a JSON Schema, given as an object or as its text. Objects have the properties that
        are named, in their order, and no others unless additionalProperties says so."""
        text = schema if isinstance(schema, str) else _json(schema, field)
        made = cls(GrammarKind.JSON_SCHEMA, text, field)
        check_schema(text, field)
        return made

    @classmethod
    def json_object(cls, field: str = "grammar") -> Self:
        """Any JSON object."""
        return cls(GrammarKind.JSON_SCHEMA, '{"type": "object"}', field)

    @classmethod
    def regex(cls, pattern: str, field: str = "grammar") -> Self:
        """A text that the pattern matches as a whole."""
        return cls(GrammarKind.REGEX, pattern, field)

    @classmethod
    def choice(cls, choices: Iterable[str], field: str = "grammar") -> Self:
        """One of these texts."""
        texts = [] if isinstance(choices, str) else list(choices)
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise InvalidRequestError(f"{field} must be a list of non-empty strings, got {choices!r}", field)
        return cls(GrammarKind.EBNF, "root ::= " + " | ".join(map(_literal, dict.fromkeys(texts))), field)

    @classmethod
    def ebnf(cls, text: str, field: str = "grammar") -> Self:
        """A text that the rule `root` derives: `root ::= "yes" | "no"`."""
        return cls(GrammarKind.EBNF, text, field)

    @classmethod
    def structure(cls, form: Form, field: str = "grammar") -> Self:
        """A text of parts: see raysonar.forms. Schemas in it are checked where they become forms."""
        return cls(GrammarKind.STRUCTURE, _json(form, field), field)

    @property
    def form(self) -> Form:
        """This grammar as a part of a structure."""
        match self.kind:
            case GrammarKind.JSON_SCHEMA:
                return {"type": "json_schema", "json_schema": json.loads(self.text)}
            case GrammarKind.REGEX:
                return {"type": "regex", "pattern": self.text}
            case GrammarKind.EBNF:
                return {"type": "grammar", "grammar": self.text}
            case GrammarKind.STRUCTURE:
                form: Form = json.loads(self.text)
                return form

    def refusal(self, reason: str) -> InvalidRequestError:
        """The error that says why this grammar is not taken."""
        return InvalidRequestError(f"{self.field}: {reason}", self.field)


def _json(schema: Mapping[str, Any], field: str) -> str:
    try:
        return json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{field}: the schema is no JSON: {error}", field) from error


def _literal(text: str) -> str:
    """A string of EBNF: JSON's escapes, each of which it knows."""
    return json.dumps(text, ensure_ascii=False)
