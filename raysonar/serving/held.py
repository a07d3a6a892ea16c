"""What answers are held to: function calls in the model's own format, and any grammar behind its reasoning."""

import re

from raysonar.errors import InvalidRequestError
from raysonar.forms import Form, free, listed, literal, mark, one_of, optional, sequence
from raysonar.grammar import Grammar
from raysonar.serving.messages import Function
from raysonar.serving.parsers import CALLS, CALLS_END, THOUGHT, ToolFormat
from raysonar.serving.protocol import ChatBody

_MARK = re.compile("(<｜[^<>]+｜>)")


def reasoned(grammar: Grammar) -> Grammar:
    """The grammar behind the rest of a reasoning that the prompt has opened."""
    return Grammar.structure(sequence(free(without=THOUGHT), mark(THOUGHT), grammar.form), grammar.field)


def calls_grammar(form: ToolFormat, body: ChatBody) -> Grammar:
    """Of an answer that `holds_calls`: one call where it must make one, else text that may end in calls.

    Raises InvalidRequestError, naming the parameters of the function that cannot be held to them.
    """
    functions = [
        sequence(*_written(function.name + form.after_name), _arguments(place, function, forced=body.forces_call))
        for place, function in body.callable
    ]
    call = sequence(*_written(form.before_name), one_of(*functions), *_written(form.after_arguments[0]))
    section = sequence(mark(CALLS), listed(call, form.between) if body.calls_many else call, mark(CALLS_END))
    if body.forces_call:
        return Grammar.structure(section, "tool_choice")
    return Grammar.structure(sequence(free(without=CALLS), optional(section)), "tools")


def _arguments(place: int, function: Function, *, forced: bool) -> Form:
    """JSON that is valid under the function's parameters, or any object where they are not to be kept to."""
    if function.strict is False or not (forced or function.strict):
        return Grammar.json_object().form
    field = f"tools[{place}].function.parameters"
    schema = function.parameters or {"type": "object", "properties": {}}
    if schema.get("type") != "object":
        raise InvalidRequestError(f'{field}: arguments are an object, so the schema needs "type": "object"', field)
    return Grammar.json_schema(schema, field).form


def _written(text: str) -> list[Form]:
    """A text with marks in it."""
    return [mark(part) if _MARK.fullmatch(part) else literal(part) for part in _MARK.split(text) if part]
