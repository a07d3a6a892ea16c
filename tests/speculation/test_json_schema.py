"""Schemas that cannot be kept exactly are refused by the keyword; the others hold, also against jsonschema."""

import json
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import jsonschema
import pytest
from xgrammar import CompiledGrammar, GrammarMatcher

from raysonar.errors import InvalidRequestError
from raysonar.grammar import MAX_BYTES, Grammar
from raysonar.speculation.grammar import GrammarCompiler


class _Bytes:
    """A tokenizer of the 256 bytes, and an end."""

    available, vocab_size, eos_token_ids = True, 257, (256,)
    marks: Mapping[str, int] = MappingProxyType({})

    def pieces(self) -> list[bytes]:
        return [bytes([byte]) for byte in range(256)] + [b""]


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(_Bytes, 257)  # type: ignore[arg-type]


def takes(compiled: CompiledGrammar, text: str) -> bool:
    matcher = GrammarMatcher(compiled)
    return all(matcher.accept_token(byte) for byte in text.encode()) and matcher.is_completed()


OBJECT = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("schema", "words", "at"),
    [
        ({"not": {"type": "integer"}}, "not is not supported", "$"),
        ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "dependentRequired is not supported", "$"),
        ({**OBJECT, "patternProperties": {"^b": {}}}, "patternProperties is not supported", "$"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems is not supported", "$"),
        ({"type": "array", "items": {"if": {}, "then": {}}}, "if is not supported", "$.items"),
        ({"allOf": [OBJECT, {"type": "object"}]}, "allOf of several", "$"),
        ({"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": {"type": "integer"}}}, "minimum beside $ref", "$"),
        ({"anyOf": [OBJECT], "type": "object"}, "type beside anyOf", "$"),
        ({"$ref": "http://a/b"}, "must point into the schema", "$"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf of schemas that may both match", "$"),
        ({"oneOf": [OBJECT, {"type": "object"}]}, "oneOf of schemas that may both match", "$"),
        ({"minimum": 4}, 'minimum needs "type": "integer"', "$"),
        ({"pattern": "^a$"}, 'pattern needs "type": "string"', "$"),
        ({"type": "number", "multipleOf": 2}, 'multipleOf needs "type": "integer"', "$"),
        ({"type": "integer", "multipleOf": 5000}, "from 1 to 1024", "$"),
        ({"type": "string", "format": "regex"}, "format 'regex' is not supported", "$"),
        ({"type": "string", "pattern": "^a*$", "maxLength": 3}, "say the length in the pattern", "$"),
        ({"type": "string", "pattern": "(?=a)b"}, "looks ahead or behind", "$"),
        ({**OBJECT, "required": ["a", "b"]}, "required names 'b'", "$"),
        (
            {"type": "object", "properties": {"q": {"enum": [1, "a"], "type": "string"}}},
            "the value 1",
            "$.properties.q",
        ),
        ({"$defs": {"x": {"contains": {}}}, "type": "null"}, "contains is not supported", "$.$defs.x"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_the_keyword_and_its_place(schema: dict[str, Any], words: str, at: str):
    with pytest.raises(InvalidRequestError) as refused:
        Grammar.json_schema(schema, "response_format")
    assert refused.value.field == "response_format"
    assert words in str(refused.value)
    assert str(refused.value).endswith(f", at {at}")


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("{", "no JSON"),
        ("[]", "must be an object"),
        ('{"type": "strin"}', "'strin' is not valid"),
        ('{"type": "object", "properties": []}', "at $.properties"),
        ('{"a":' * 100 + "1" + "}" * 100, "nested more than"),
        ("[" * 30_000, "no JSON"),
        (json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(2000)}}), "more than 2000 schemas"),
        (
            json.dumps({"type": "object", "properties": {f"p{i}": {} for i in range(61)}, "minProperties": 1}),
            "at most 60 properties",
        ),
        (json.dumps({"description": "x" * MAX_BYTES}), f"at most {MAX_BYTES}"),
        ('{"title": "\ud800"}', "not valid Unicode"),
    ],
)
def test_what_is_no_schema_is_refused(schema: str, words: str):
    with pytest.raises(InvalidRequestError, match="guided_json: ") as refused:
        Grammar.json_schema(schema, "guided_json")
    assert words in str(refused.value)


def wrapped(schema: Any, *names: str) -> dict[str, Any]:
    """An object that must have these properties, all of one schema."""
    return {"type": "object", "properties": dict.fromkeys(names, schema), "required": [*names]}


def either(definitions: dict[str, Any], one: str = "a", other: str = "b") -> dict[str, Any]:
    return {"$defs": definitions, "oneOf": [{"$ref": f"#/$defs/{name}"} for name in (one, other)]}


def chain(levels: int, end: Any, *names: str, side: str = "") -> dict[str, Any]:
    """Definitions of objects, each of which holds the next one."""
    links = {f"{side}{i}": wrapped({"$ref": f"#/$defs/{side}{i + 1}"}, *names) for i in range(levels)}
    return {**links, f"{side}{levels}": end}


TWINS = {name: wrapped({"$ref": f"#/$defs/{name}"}, "x") for name in ("a", "b")}
CROSSED = {"a": wrapped({"$ref": "#/$defs/b"}, "x"), "b": wrapped({"$ref": "#/$defs/a"}, "x")}


@pytest.mark.parametrize(
    "schema",
    [
        either(TWINS, "a", "a"),
        either(TWINS),
        either(CROSSED),
        either(chain(40, {"type": "string"}, "x", "y"), "0", "0"),
        either(chain(40, {}, "x", "y", side="a") | chain(40, {}, "x", "y", side="b"), "a0", "b0"),
    ],
    ids=["itself", "twins", "crossed", "itself in a chain", "two chains"],
)
def test_recursive_and_chained_schemas_that_nothing_tells_apart_are_refused(schema: dict[str, Any]):
    with pytest.raises(InvalidRequestError, match="oneOf of schemas that may both match"):
        Grammar.json_schema(schema)


def told_apart_in_a_loop() -> dict[str, Any]:
    """Each holds the other one, and a constant."""
    one, other = (wrapped({"$ref": f"#/$defs/{name}"}, "x") for name in "ba")
    for place, each in enumerate((one, other)):
        each["properties"]["kind"] = wrapped({"const": place}, "is")
        each["required"].append("kind")
    return either({"a": one, "b": other})


def nested(name: str) -> dict[str, Any]:
    """A constant within 20 objects."""
    schema: dict[str, Any] = {"const": name}
    for _ in range(20):
        schema = wrapped(schema, "in")
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [nested(name) for name in "abc"]},
        told_apart_in_a_loop(),
        either(chain(40, {"const": 1}, "x", "y", side="a") | chain(40, {"const": 2}, "x", "y", side="b"), "a0", "b0"),
        either(chain(300, {"type": "null"}, "x", side="a") | chain(300, {"type": "string"}, "x", side="b"), "a0", "b0"),
        {"oneOf": [wrapped({"const": i}, "kind") for i in range(300)]},
    ],
    ids=["nested", "in a loop", "ends of chains", "ends of long chains", "many"],
)
def test_what_is_told_apart_however_deep_inside_is_taken(schema: dict[str, Any]):
    assert json.loads(Grammar.json_schema(schema).text) == schema


@pytest.mark.parametrize("choices", [[], [""], ["a", 1], "abc"])
def test_choices_are_texts(choices: object):
    with pytest.raises(InvalidRequestError, match="guided_choice must be a list of non-empty strings"):
        Grammar.choice(choices, "guided_choice")  # type: ignore[arg-type]


def kind(name: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"kind": {"const": name}, **properties}, "required": ["kind"]}


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        (OBJECT, [{"a": 1}, {}], [{"a": "x"}, {"b": 1}, [], 1]),
        ({"type": "object"}, [{}, {"x": [1, {"y": None}]}], [[], 1, "a"]),
        ({**OBJECT, "additionalProperties": {"type": "string"}}, [{"a": 1, "b": "x"}], [{"b": 1}, {"a": "x"}]),
        ({"type": "integer", "minimum": -3, "maximum": 7}, [-3, 0, 7], [-4, 8, 1.5, "1"]),
        ({"type": "integer", "multipleOf": 5}, [5, 100], [3]),
        ({"type": "number", "exclusiveMinimum": 3.5}, [3.6, 4], [3.5, 1]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "éé", "日本語"], ["a", "abcd"]),
        ({"type": "string", "pattern": "^a+b$"}, ["ab", "aab"], ["b", "xab"]),
        ({"type": "string", "format": "ipv4"}, ["1.2.3.4"], ["1.2.3", "x"]),
        ({"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2}, [[1], [1, 2]], [[], [1, 2, 3]]),
        ({"type": "array", "prefixItems": [{"type": "integer"}], "items": False}, [[1]], [["a"], [1, 2]]),
        ({"enum": [1, "a", None, [1]]}, [1, "a", None, [1]], [2, "b", [2]]),
        ({"const": "x\ny"}, ["x\ny"], ["xy"]),
        ({"type": ["integer", "null"], "minimum": 4}, [4, None], [3, "a"]),
        ({"oneOf": [kind("x", a=OBJECT), kind("y")]}, [{"kind": "x", "a": {"a": 1}}], [{"kind": "y", "a": 1}, {}]),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, [1, "a"], [None, 1.5]),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"enum": [1]}}}, [1], [2]),
        ({"type": "object", "properties": {"c": {"$ref": "#"}}}, [{}, {"c": {"c": {}}}], [{"c": 1}]),
        ({"type": "array", "title": "t", "examples": [1], "default": []}, [[1, 1]], [1]),
        ({"type": "array", "items": {"enum": [1]}, "uniqueItems": False}, [[1, 1]], [[2]]),
    ],
)
def test_what_is_taken_is_kept(schema: dict[str, Any], good: list[Any], bad: list[Any]):
    compiled = compiler().compile(Grammar.json_schema(schema))
    for value in good:
        jsonschema.validate(value, schema)
        assert takes(compiled, json.dumps(value, ensure_ascii=False)), value
    for value in bad:
        assert not takes(compiled, json.dumps(value, ensure_ascii=False)), value
    for value in good[:1]:
        assert not takes(compiled, json.dumps(value) + " ")
        assert not takes(compiled, "\n" + json.dumps(value))


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": "string", "maxLength": 5},
        {"type": "string", "minLength": 1},
        {"type": "string", "pattern": ".*"},
        {"type": "string", "pattern": "^[^b]$"},
    ],
)
def test_a_string_holds_no_control_character(schema: dict[str, Any]):
    compiled = compiler().compile(Grammar.json_schema(schema))
    assert takes(compiled, '"a"')
    for code in range(32):
        assert not takes(compiled, f'"{chr(code)}"')


@pytest.mark.parametrize("schema", [{"type": "string"}, {"type": "string", "maxLength": 5}])
def test_a_string_holds_characters_and_no_other_bytes(schema: dict[str, Any]):
    """Half a surrogate pair in UTF-8 would be decoded to three characters."""
    matcher = GrammarMatcher(compiler().compile(Grammar.json_schema(schema)))
    for good in ("é", "\ud7ff", "\ue000", "\uffff", "🙂"):
        assert takes(compiler().compile(Grammar.json_schema(schema)), f'"{good}"')
    for byte in b'"\xed':
        assert matcher.accept_token(byte)
    assert not matcher.accept_token(0xA0)
