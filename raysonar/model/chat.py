"""Chat templates: Jinja sources from a model folder, rendered with transformers' conventions."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from raysonar.errors import InvalidRequestError, ModelFolderError

Message = Mapping[str, Any]

_END = "\ue000end of the last message\ue001"
"""Marks where the last message ends in the rendered text; private characters, which no conversation has."""

_ASKS_FOR_NULL = re.compile(r"content['\"]?\]? is (not )?none")
"""Of a template that tells an assistant's calls from its words by a content that is null, as DeepSeek's do."""


class _JsonText(str):
    """The arguments of a function call as the model wrote them: `tojson` gives them as they are, not quoted again.

    Some templates put arguments through `tojson`, others take the text.
    """


class ChatTemplate:
    """One compiled template.

    Args:
        source: the template.
        origin: where it comes from, for errors.
        special_tokens: what it may name: bos_token, eos_token, ...

    Attributes:
        source: the template.
        knows_tools: whether it reads `tools`.

    Raises:
        ModelFolderError: the template does not compile.
    """

    def __init__(self, source: str, origin: str, special_tokens: Mapping[str, str]) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._asks_for_null = _ASKS_FOR_NULL.search(source) is not None
        environment = _environment()
        try:
            self._template = environment.from_string(source)
            self.knows_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
        except jinja2.TemplateSyntaxError as error:
            raise ModelFolderError(f"{origin}: chat template, line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise ModelFolderError(f"{origin}: chat template: nested too deeply") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The conversation as one text.

        Args:
            messages: role and content of each; content is a text, or a list of {"type": "text", "text": ...} parts,
                which are joined by line breaks. Keys whose value is null are left out.
            add_generation_prompt: end with what starts the assistant's turn.
            continue_final_message: end where the last message's content does, so that the answer goes on with it.
            tools: JSON schemas of functions, for templates that know them.
            variables: whatever else the template reads.

        Raises:
            InvalidRequestError: field "messages"; the messages' form is wrong, or the template refuses them.
        """
        if not messages:
            raise InvalidRequestError("messages: expected at least one message, found none", "messages")
        plain = [self._plain(at, message) for at, message in enumerate(messages)]
        if continue_final_message:
            plain[-1] |= {"content": f"{plain[-1].get('content') or ''}{_END}"}
        values = self._special_tokens | variables
        values |= {"messages": plain, "tools": tools, "documents": variables.get("documents")}
        text = self._text(values | {"add_generation_prompt": add_generation_prompt and not continue_final_message})
        if not continue_final_message:
            return text
        before, mark, _ = text.rpartition(_END)
        if not mark:
            raise InvalidRequestError("the chat template leaves the last message out: it cannot go on", "messages")
        return before

    def _plain(self, at: int, message: Message) -> dict[str, Any]:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise InvalidRequestError(f"messages[{at}]: expected an object with a role, found {message!r}", "messages")
        plain = {key: value for key, value in message.items() if value is not None}
        if isinstance(plain.get("content"), list):
            plain["content"] = "\n".join(_text(at, part) for part in plain["content"])
        elif not isinstance(plain.get("content", ""), str):
            raise InvalidRequestError(
                f"messages[{at}].content: expected a text, found {plain['content']!r}", "messages"
            )
        if isinstance(plain.get("tool_calls"), list):
            plain["tool_calls"] = [_plain_call(call) for call in plain["tool_calls"]]
            if self._asks_for_null and not plain.get("content"):
                plain["content"] = None
        return plain

    def _text(self, values: dict[str, Any]) -> str:
        try:
            return self._template.render(values)
        except jinja2.TemplateError as error:
            raise InvalidRequestError(f"the chat template refuses the messages: {error}", "messages") from error
        except Exception as error:  # a template is a program: what it raises depends on what the messages hold
            reason = f"{type(error).__name__}: {error}"
            raise InvalidRequestError(f"the chat template fails on these messages: {reason}", "messages") from error


def _plain_call(call: Any) -> Any:
    """A function's call with its arguments as JSON text, where they are a text."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
        return {**call, "function": {**function, "arguments": _JsonText(function["arguments"])}}
    return call


def _text(at: int, part: Any) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidRequestError(
        f"messages[{at}].content: only parts of type text are supported, found {part!r}", "messages"
    )


class _Generation(Extension):
    """`{% generation %}` marks the assistant's own tokens for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Without the escapes for HTML of Jinja's own filter."""
    if isinstance(value, _JsonText):
        return value
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
