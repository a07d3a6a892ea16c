"""The parts that structured grammars are made of: xgrammar's formats of structural tags, and marks.

A mark is written by one token, its own, where the vocabulary has it. No other part matches such a token, even where the
mark's text would fit: a model cannot end a call in the middle of a string.
"""

from collections.abc import Mapping
from typing import Any

Form = Mapping[str, Any]
"""JSON: what a part is by its "type", and its own keys."""


def mark(text: str) -> Form:
    """The token of this text; its letters where the vocabulary has none."""
    return {"type": "mark", "text": text}


def literal(text: str) -> Form:
    """Exactly this."""
    return {"type": "const_string", "value": text}


def free(*, without: str) -> Form:
    """Any text, special tokens included, as long as this does not occur in it, in whatever tokens."""
    return {"type": "any_text", "excludes": [without]}


def sequence(*parts: Form) -> Form:
    """One behind the other."""
    return {"type": "sequence", "elements": list(parts)}


def one_of(*parts: Form) -> Form:
    """Any of them."""
    return {"type": "or", "elements": list(parts)}


def optional(part: Form) -> Form:
    """It, or nothing."""
    return {"type": "optional", "content": part}


def listed(part: Form, between: str) -> Form:
    """It once or more, with this text between two of them."""
    tag = {"type": "tag", "begin": "", "content": part, "end": ""}
    return {"type": "tags_with_separator", "tags": [tag], "separator": between, "at_least_one": True}
