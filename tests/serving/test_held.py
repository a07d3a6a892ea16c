"""What answers are held to: whatever a model would say, its calls can be read and fit what is declared of functions."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import pytest
import torch
from support.scripted import VOCAB, make_folder
from xgrammar import CompiledGrammar, GrammarMatcher

from raysonar.errors import InvalidRequestError
from raysonar.grammar import Grammar
from raysonar.model.folder import open_folder
from raysonar.model.tokenizer import Tokenizer
from raysonar.serving.held import calls_grammar, reasoned
from raysonar.serving.parsers import TOOL_FORMATS, AnswerFormat, Part, ToolFormatName
from raysonar.serving.protocol import ChatBody
from raysonar.speculation.grammar import GrammarCompiler, allowed

FORMATS = sorted(TOOL_FORMATS)
CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALL_END, SEPARATOR = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"
EMPTY = {"type": "object", "properties": {}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6},
            "days": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 9}, "maxItems": 2},
        },
        "required": ["city"],
    },
    "clock": EMPTY,
    "say": {"type": "object", "properties": {"what": {"const": f'"{CALL_END}\n```{CALL_END}'}}, "required": ["what"]},
}


@pytest.fixture(scope="module", params=[True, False], ids=["special", "plain"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """With the marks as special tokens, or as others."""
    folder = make_folder(tmp_path_factory.mktemp("held") / "model", template="", special=request.param)
    return Tokenizer.from_folder(open_folder(folder))


@pytest.fixture(scope="module")
def compiled(tokenizer: Tokenizer) -> Callable[[Grammar], CompiledGrammar]:
    return GrammarCompiler(lambda: tokenizer, VOCAB).compile


def body(strict: bool | None = None, **values: Any) -> ChatBody:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    ]
    sent = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": tools} | values
    return ChatBody.model_validate_json(json.dumps(sent))


def said(tokenizer: Tokenizer, grammar: CompiledGrammar, draw: random.Random, most: int = 400) -> str:
    """What a model says that draws any token that it may, the rare ones often; up to its end."""
    matcher, tokens = GrammarMatcher(grammar), list[int]()
    rare = {*tokenizer.marks.values(), *tokenizer.eos_token_ids, *tokenizer.encode('"', add_special_tokens=False)}
    mask = torch.zeros(1, -(-VOCAB // 32), dtype=torch.int32)
    while len(tokens) < most:
        matcher.fill_next_token_bitmask(mask)
        choices = allowed(mask, VOCAB)[0].nonzero().flatten().tolist()
        token = draw.choice([each for each in choices if each in rare and draw.random() < 0.2] or choices)
        assert matcher.accept_token(token)
        if token in tokenizer.eos_token_ids:
            return tokenizer.decode(tokens, skip_special_tokens=False)
        tokens.append(token)
    raise AssertionError("it does not end")


def parts_of(form: AnswerFormat, text: str, *, opened: bool = False) -> list[Part]:
    """Neighbours of a kind as one part."""
    parser, out = form.parser(opened=opened), list[Part]()
    for part in [part for piece in text for part in parser.add(piece)] + parser.end():
        if out and out[-1].kind == part.kind and part.kind != "call":
            out[-1] = Part(part.kind, out[-1].text + part.text)
        else:
            out.append(part)
    return out


def check_calls(parts: Sequence[Part]) -> list[str]:
    """Every call's arguments are valid; the names of the functions."""
    names, texts = parts[::2], parts[1::2]
    assert {part.kind for part in names} == {"call"}
    assert {part.kind for part in texts} == {"arguments"}
    for name, text in zip(names, texts, strict=True):
        jsonschema.validate(json.loads(text.text), SCHEMAS[name.text] | {"additionalProperties": False})
    return [name.text for name in names]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("parallel", [True, False])
def test_a_required_answer_is_calls_and_nothing_else(
    tokenizer: Tokenizer, compiled: Callable[[Grammar], CompiledGrammar], name: ToolFormatName, parallel: bool
):
    asked = body(tool_choice="required", parallel_tool_calls=parallel)
    grammar = compiled(calls_grammar(TOOL_FORMATS[name], asked))
    counts, called, draw = set(), set(), random.Random(1)
    for _ in range(60):
        text = said(tokenizer, grammar, draw, most=4000)
        assert text.startswith(CALLS)
        assert text.endswith(CALLS_END)
        names = check_calls(parts_of(AnswerFormat(TOOL_FORMATS[name], held=True), text))
        counts.add(len(names))
        called.update(names)
    assert called == set(SCHEMAS)
    assert counts == {1} if not parallel else {1, 2} <= counts


@pytest.mark.parametrize("name", FORMATS)
def test_a_named_function_is_called_once(
    tokenizer: Tokenizer, compiled: Callable[[Grammar], CompiledGrammar], name: ToolFormatName
):
    asked = body(tool_choice={"type": "function", "function": {"name": "weather"}})
    grammar = compiled(calls_grammar(TOOL_FORMATS[name], asked))
    draw = random.Random(2)
    for _ in range(30):
        parts = parts_of(AnswerFormat(TOOL_FORMATS[name], held=True), said(tokenizer, grammar, draw))
        assert check_calls(parts) == ["weather"]


@pytest.mark.parametrize("name", FORMATS)
def test_strict_functions_are_held_when_the_model_calls_them(
    tokenizer: Tokenizer, compiled: Callable[[Grammar], CompiledGrammar], name: ToolFormatName
):
    """Text first, or text only."""
    grammar = compiled(calls_grammar(TOOL_FORMATS[name], body(strict=True, parallel_tool_calls=False)))
    counts, draw = set(), random.Random(3)
    for _ in range(80):
        text = said(tokenizer, grammar, draw, most=4000)
        parts = parts_of(AnswerFormat(TOOL_FORMATS[name], held=True), text)
        content = parts.pop(0).text if parts and parts[0].kind == "content" else ""
        counts.add((bool(content), len(check_calls(parts)) if parts else 0))
        assert CALLS not in content
    assert counts == {(False, 1), (True, 0), (True, 1)} | (counts & {(False, 0)})


def test_reasoning_comes_first_and_the_grammar_holds_behind_it(
    tokenizer: Tokenizer, compiled: Callable[[Grammar], CompiledGrammar]
):
    """It may be empty; it is free, and its end is never spelt with other tokens."""
    draw, thought, grammar = random.Random(4), set[str](), compiled(reasoned(Grammar.choice(["yes", "no"])))
    for _ in range(60):
        *reasoning, content = parts_of(
            AnswerFormat(reasons=True), said(tokenizer, grammar, draw, most=4000), opened=True
        )
        assert content in (Part("content", "yes"), Part("content", "no"))
        assert [part.kind for part in reasoning] in ([], ["reasoning"])
        thought.update(part.text for part in reasoning)
    assert len(thought) > 30
    assert any(CALL in text for text in thought)


def test_calls_come_behind_reasoning_too(tokenizer: Tokenizer, compiled: Callable[[Grammar], CompiledGrammar]):
    form = TOOL_FORMATS["deepseek_v3.1"]
    grammar = reasoned(calls_grammar(form, body(tool_choice="required", parallel_tool_calls=False)))
    assert grammar.field == "tool_choice"
    draw, thought = random.Random(5), 0
    for _ in range(20):
        parts = parts_of(
            AnswerFormat(form, True, held=True), said(tokenizer, compiled(grammar), draw, 4000), opened=True
        )
        if parts[0].kind == "reasoning":
            thought += 1
            parts = parts[1:]
        assert len(check_calls(parts)) == 1
    assert thought > 10


def test_what_is_held_to_what():
    """`strict` may be left out, be true or be false, of an answer that is held."""
    form = TOOL_FORMATS["deepseek_v3"]
    any_object, schema = Grammar.json_object().form, {"type": "json_schema", "json_schema": SCHEMAS["weather"]}
    for strict, choice, expected in [
        (None, "required", schema),
        (True, "required", schema),
        (False, "required", any_object),
        (True, "auto", schema),
    ]:
        text = calls_grammar(form, body(strict, tool_choice=choice)).text
        assert json.dumps(expected, ensure_ascii=False) in text
        assert text.count(json.dumps(any_object)) == (3 if expected is any_object else 0)
    assert not body().holds_calls
    assert not body(False).holds_calls
    assert not body(True, tool_choice="none").holds_calls
    tools = [
        {"type": "function", "function": {"name": "a", "strict": True}},
        {"type": "function", "function": {"name": "b", "parameters": {"type": "object", "not": {}}}},
    ]
    mixed = calls_grammar(form, body(tools=tools))
    assert json.dumps(EMPTY) in mixed.text
    assert json.dumps(any_object) in mixed.text
    with pytest.raises(InvalidRequestError, match="not is not supported") as refused:
        calls_grammar(form, body(tools=tools, tool_choice="required"))
    assert refused.value.field == "tools[1].function.parameters"


@pytest.mark.parametrize("parameters", [{"type": "string"}, {"anyOf": [EMPTY]}, {"properties": {}}])
def test_parameters_that_are_no_object_are_refused(parameters: dict[str, Any]):
    tools = [{"type": "function", "function": {"name": "a", "parameters": parameters, "strict": True}}]
    with pytest.raises(InvalidRequestError, match='needs "type": "object"') as refused:
        calls_grammar(TOOL_FORMATS["deepseek_v3"], body(tools=tools))
    assert refused.value.field == "tools[0].function.parameters"
