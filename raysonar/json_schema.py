"""Which JSON Schemas can be kept exactly: the others are refused by the name of the keyword, never half kept.

Rules are xgrammar's, found by trying: what it ignores is refused here.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

from raysonar.errors import InvalidRequestError

MAX_DEPTH = 64
"""Of objects and lists in each other, two to a level of properties: compiling takes time with the cube of it."""
MAX_SCHEMAS = 2000
"""In one schema, itself included: a few tenths of a second of compiling."""
MAX_COUNTED = 60
"""Properties of an object that has minProperties or maxProperties: compiling takes time with the cube of them."""
MAX_MULTIPLE = 1024

_UNSUPPORTED = frozenset(
    "not if then else dependentRequired dependentSchemas dependencies contains minContains maxContains uniqueItems "
    "propertyNames patternProperties additionalItems unevaluatedItems unevaluatedProperties $dynamicRef "
    "$recursiveRef".split()
)
_HARMLESS: Mapping[str, tuple[bool, ...]] = {
    "uniqueItems": (False,),
    "unevaluatedItems": (False, True),  # False is what is kept anyway
    "unevaluatedProperties": (False, True),
}
"""Values of unsupported keywords that ask for nothing more."""
_CONSTRAINTS: Mapping[str, tuple[str, ...]] = {
    "minLength": ("string",),
    "maxLength": ("string",),
    "pattern": ("string",),
    "format": ("string",),
    "minimum": ("number", "integer"),
    "maximum": ("number", "integer"),
    "exclusiveMinimum": ("number", "integer"),
    "exclusiveMaximum": ("number", "integer"),
    "multipleOf": ("integer",),
    "items": ("array",),
    "prefixItems": ("array",),
    "minItems": ("array",),
    "maxItems": ("array",),
    "properties": ("object",),
    "required": ("object",),
    "additionalProperties": ("object",),
    "minProperties": ("object",),
    "maxProperties": ("object",),
}
"""Keywords, and the types beside which they are kept."""
_SOLE = ("$ref", "anyOf", "oneOf", "allOf", "enum", "const")
"""Keywords beside which nothing else is kept."""
_FORMATS = frozenset(
    "date-time date time duration email hostname ipv4 ipv6 uuid uri uri-reference uri-template json-pointer "
    "relative-json-pointer".split()
)
Schema = Mapping[str, Any]
_ANYTHING: Schema = {}


def check_schema(text: str, field: str) -> None:
    """Raises InvalidRequestError: it is no JSON, no valid schema, or cannot be kept exactly."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match

    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"{field}: the schema is no JSON: {error}", field) from error
    if not isinstance(schema, dict):
        raise InvalidRequestError(f"{field}: a schema must be an object, got {text[:100]}", field)
    if _depth(schema) > MAX_DEPTH:
        raise InvalidRequestError(f"{field}: the schema is nested more than {MAX_DEPTH} levels deep", field)
    wrong = best_match(Draft202012Validator(Draft202012Validator.META_SCHEMA).iter_errors(schema))
    if wrong is not None:
        raise InvalidRequestError(f"{field}: not a valid schema: {wrong.message}, at {wrong.json_path}", field)
    schemas = list(islice(_subschemas(schema, "$"), MAX_SCHEMAS + 1))
    if len(schemas) > MAX_SCHEMAS:
        raise InvalidRequestError(f"{field}: the schema has more than {MAX_SCHEMAS} schemas in it", field)
    apart = _Apart(schema)
    for path, each in schemas:
        if (reason := _fault(each, apart)) is not None:
            raise InvalidRequestError(f"{field}: the schema cannot be kept exactly: {reason}, at {path}", field)


def _depth(value: Any) -> int:
    """Levels of objects and lists in each other; without recursion."""
    depth, level = 0, [value]
    while level:
        depth += 1
        inner = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        level = [child for children in inner for child in children]
    return depth


def _subschemas(schema: Any, path: str) -> Iterator[tuple[str, Schema]]:
    """A schema and every schema in it, with where they are."""
    if not isinstance(schema, Mapping):
        return
    yield path, schema
    for name in ("$defs", "definitions", "properties"):
        for key, each in schema.get(name, {}).items():
            yield from _subschemas(each, f"{path}.{name}.{key}")
    for name in ("items", "additionalProperties"):
        yield from _subschemas(schema.get(name), f"{path}.{name}")
    for name in ("prefixItems", "anyOf", "oneOf", "allOf"):
        for index, each in enumerate(schema.get(name, ())):
            yield from _subschemas(each, f"{path}.{name}[{index}]")


def _fault(schema: Schema, apart: "_Apart") -> str | None:
    """Why this one schema cannot be kept; None when it can."""
    for name in schema:
        if name in _UNSUPPORTED and schema[name] not in _HARMLESS.get(name, ()):
            return f"{name} is not supported"
    sole = [name for name in _SOLE if name in schema]
    kept = {"type"} & schema.keys() if sole and sole[0] in ("enum", "const") else set()
    beside = [name for name in (*_CONSTRAINTS, "type") if name in schema and name not in kept] + sole[1:]
    if sole and beside:
        return f"{beside[0]} beside {sole[0]} is not supported"
    if sole:
        return _combination_fault(schema, apart)
    types = _types(schema)
    for name, wanted in _CONSTRAINTS.items():
        if name in schema and not set(wanted) & types and (name == "multipleOf" or not types):
            return f'{name} needs "type": "{wanted[-1]}" beside it'
    for name in ("minItems", "maxItems", "uniqueItems"):
        if name in schema and not {"items", "prefixItems"} & schema.keys():
            return f"{name} needs items beside it, to say what they are"
    multiple = schema.get("multipleOf", 1)
    if not (float(multiple).is_integer() and 1 <= multiple <= MAX_MULTIPLE):
        return f"multipleOf must be a whole number from 1 to {MAX_MULTIPLE}, got {multiple}"
    if "format" in schema and schema["format"] not in _FORMATS:
        return f"format {schema['format']!r} is not supported, use one of {', '.join(sorted(_FORMATS))}"
    if "pattern" in schema and {"minLength", "maxLength", "format"} & schema.keys():
        return "pattern beside minLength, maxLength or format is not supported; say the length in the pattern"
    if "pattern" in schema and any(sign in schema["pattern"] for sign in ("(?=", "(?!", "(?<")):
        return f"pattern {schema['pattern']!r} looks ahead or behind, which is not supported"
    if {"minProperties", "maxProperties"} & schema.keys() and len(schema.get("properties", ())) > MAX_COUNTED:
        return f"minProperties and maxProperties are for at most {MAX_COUNTED} properties"
    unnamed = [name for name in schema.get("required", ()) if name not in schema.get("properties", {})]
    if unnamed:
        return f"required names {unnamed[0]!r}, which properties does not have"
    return None


def _combination_fault(schema: Schema, apart: "_Apart") -> str | None:
    if "$ref" in schema and not (schema["$ref"] == "#" or schema["$ref"].startswith("#/")):
        return f'$ref must point into the schema ("#/..."), got {schema["$ref"]!r}'
    if len(schema.get("allOf", ())) > 1:
        return "allOf of several schemas is not supported; write them as one"
    for one, other in combinations(map(apart.facts, schema.get("oneOf", ())), 2):
        if not apart.shown(one, other):
            return "oneOf of schemas that may both match is not supported; use anyOf, or tell them apart by a const"
    types = _types(schema)
    for value in [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]:
        if types and not _type_of(value) & types:
            return f"the value {json.dumps(value)} is not of type {schema['type']}"
    return None


def _types(schema: Schema) -> set[str]:
    found = schema.get("type", ())
    return {found} if isinstance(found, str) else set(found)


def _type_of(value: Any) -> set[str]:
    match value:
        case None:
            return {"null"}
        case bool():
            return {"boolean"}
        case int():
            return {"integer", "number"}
        case float():
            return {"number", "integer"} if value.is_integer() else {"number"}
        case str():
            return {"string"}
        case list():
            return {"array"}
        case _:
            return {"object"}


def _resolved(schema: Any, root: Schema) -> Schema:
    """What a $ref points at, followed a few times; `_ANYTHING` for what is no object."""
    for _ in range(8):
        if not (isinstance(schema, Mapping) and isinstance(schema.get("$ref"), str)):
            break
        target: Any = root
        for step in schema["$ref"].split("/")[1:]:
            name = step.replace("~1", "/").replace("~0", "~")
            target = target.get(name, _ANYTHING) if isinstance(target, Mapping) else _ANYTHING
        schema = target
    return schema if isinstance(schema, Mapping) else _ANYTHING


@dataclass(frozen=True, eq=False)
class _Facts:
    """What may tell a schema's values from another's."""

    values: set[str] | None
    types: set[str]
    required: Mapping[str, Any]
    """The schemas of an object's required properties."""

    def differ(self, other: "_Facts") -> bool:
        """Whether no value is valid under both, without a look at their properties."""
        if self.values is not None and other.values is not None:
            return not self.values & other.values
        return bool(self.types and other.types) and not self.types & other.types


class _Apart:
    """Of which schemas no value is valid under both, as far as types, constants and required properties show it."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._facts: dict[int, _Facts] = {}  # by the identity of a schema, which the root keeps
        self._shown: dict[tuple[_Facts, _Facts], bool] = {}

    def facts(self, schema: Any) -> _Facts:
        """Of a schema, or of what its $ref points at."""
        if id(schema) not in self._facts:
            target = _resolved(schema, self._root)
            if id(target) not in self._facts:
                self._facts[id(target)] = _facts(target)
            self._facts[id(schema)] = self._facts[id(target)]
        return self._facts[id(schema)]

    def shown(self, one: _Facts, other: _Facts) -> bool:
        """Each pair is looked at once, without recursion: schemas may be recursive, and chains of them long."""
        if one.differ(other):
            return True
        holders: dict[tuple[_Facts, _Facts], list[tuple[_Facts, _Facts]]] = defaultdict(list)
        asked, apart = [(one, other)], []
        while asked:
            pair = asked.pop()
            if pair not in self._shown:
                self._shown[pair] = pair[0].differ(pair[1])
                for inner in [] if self._shown[pair] else self._properties(*pair):
                    holders[inner].append(pair)
                    asked.append(inner)
            if self._shown[pair]:
                apart.append(pair)
        while apart:
            for holder in holders.pop(apart.pop(), ()):
                self._shown[holder] = True
                apart.append(holder)
        return self._shown[one, other]

    def _properties(self, one: _Facts, other: _Facts) -> list[tuple[_Facts, _Facts]]:
        """The pairs of which one that is apart suffices."""
        if one.values is not None and other.values is not None:
            return []
        common = one.required.keys() & other.required.keys()
        return [(self.facts(one.required[name]), self.facts(other.required[name])) for name in common]


def _facts(schema: Schema) -> _Facts:
    types, properties = _possible_types(schema), schema.get("properties", {})
    names = schema.get("required", ()) if types == {"object"} else ()
    return _Facts(_values(schema), types, {name: properties[name] for name in names if name in properties})


def _values(schema: Schema) -> set[str] | None:
    """The values of an enum or a const, as JSON; None without one."""
    if "const" in schema:
        return {json.dumps(schema["const"], sort_keys=True)}
    return {json.dumps(each, sort_keys=True) for each in schema["enum"]} if "enum" in schema else None


def _possible_types(schema: Schema) -> set[str]:
    """Empty: any."""
    types = _types(schema)
    return types | {"integer"} if "number" in types else types
