"""Structured output on the demo model: valid under its schema, and the same text whatever shape the steps have."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from raysonar import Engine, Grammar, SamplingParams
from raysonar.demo import DRAFT, TARGET
from raysonar.driver.outputs import GenerationResult
from raysonar.errors import InvalidRequestError
from raysonar.forms import free, listed, literal, mark, one_of, optional, sequence
from raysonar.grammar import GrammarKind

CITY = {"type": "object", "properties": {"n": {"type": "string", "maxLength": 8}}, "required": ["n"]}
COUNT = {"type": "integer", "minimum": 0, "maximum": 999}
POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}, "kind": {"enum": ["a", "b"]}},
    "required": ["x", "kind"],
}


def tagged(kind: str, value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": {"is": {"const": kind}, "v": value}, "required": ["is", "v"]}


SCHEMAS: dict[str, dict[str, Any]] = {
    "flat": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "member": {"type": "boolean"},
        },
        "required": ["name", "age", "member"],
        "additionalProperties": False,
    },
    "nested": {
        "type": "object",
        "properties": {"points": {"type": "array", "items": POINT, "minItems": 1, "maxItems": 3}},
        "required": ["points"],
    },
    "references": {
        "type": "object",
        "properties": {
            "capital": {"$ref": "#/$defs/city"},
            "other": {"anyOf": [{"$ref": "#/$defs/city"}, {"type": "null"}]},
        },
        "required": ["capital", "other"],
        "$defs": {"city": CITY},
    },
    "one of": {"oneOf": [tagged("number", COUNT), tagged("word", {"type": "string", "maxLength": 9})]},
    "text": {"type": "string", "minLength": 3, "maxLength": 30},
    "pattern": {"type": "string", "pattern": "^[A-Z][a-z]{1,8} (North|South)$"},
    "any character": {"type": "string", "pattern": "^.{3,6}$"},
    "date": {"type": "string", "format": "date"},
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}, {"enum": ["é", "東京", '\n"\\', None]}],
        "items": False,
        "minItems": 2,
    },
}
QUESTIONS = ["What is the capital of France?", "Describe the climate of Norway.", "Which languages are spoken in Peru?"]
MOST = 110


def structures() -> list[Grammar]:
    """Like function calls, and like text that may go on with one."""
    schemas = [Grammar.json_schema(SCHEMAS[name]) for name in ("flat", "one of")]
    names = one_of(*(sequence(literal(f"f{n}:"), schema.form) for n, schema in enumerate(schemas)))
    call = sequence(mark("<|user|>"), names, mark("<|pad|>"))
    section = sequence(mark("<|system|>"), call, optional(call), mark("<|assistant|>"))
    thinking = sequence(free(without="<|assistant|>"), mark("<|assistant|>"), listed(literal("a"), " "))
    return [
        Grammar.structure(part) for part in (section, sequence(free(without="<|system|>"), optional(section)), thinking)
    ]


@contextmanager
def engine(**options: Any) -> Iterator[Engine]:
    settings = {"dtype": "float32", "threads": 1, "max_running": 8, "max_model_len": 160, **options}
    with Engine.from_folder(TARGET, **settings) as made:
        yield made


@cache
def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """Every schema greedy and seeded at temperature 1, other grammars, and answers without one between them."""
    with engine(speculative_tokens=0) as made:
        chats = [made.tokenizer.render_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    grammars = [Grammar.json_schema(schema) for schema in SCHEMAS.values()]
    grammars += [
        Grammar.regex(r"(\d{1,3}\.){3}\d{1,3}"),
        Grammar.choice(["Paris", "Par", "London"]),
        Grammar.ebnf('root ::= "(" root ")" | [0-9]{1,4}'),
        *structures(),
    ]
    params = []
    for seed, grammar in enumerate(grammars):
        params += [SamplingParams(temperature=0, max_tokens=MOST, grammar=grammar)]
        params += [SamplingParams(temperature=1, top_p=0.95, seed=seed, max_tokens=MOST, grammar=grammar)]
        if seed % 3 == 0:
            params += [SamplingParams(temperature=0.9, seed=seed, max_tokens=30)]
    return [chats[i % len(chats)] for i in range(len(params))], params


def ids(results: Sequence[GenerationResult]) -> list[list[int]]:
    return [result.token_ids for result in results]


@cache
def one_by_one() -> list[list[int]]:
    """No speculation, no prefix cache, one request at a time."""
    with engine(speculative_tokens=0, prefix_caching=False, max_running=1) as made:
        return ids(made.generate(*requests()))


def check_schemas(results: Sequence[GenerationResult], params: Sequence[SamplingParams]) -> int:
    """Every text that ended is valid under its schema; how many there were."""
    checked = 0
    for result, each in zip(results, params, strict=True):
        if each.grammar is None or each.grammar.kind is not GrammarKind.JSON_SCHEMA:
            continue
        assert result.finish_reason == "stop", result.text
        jsonschema.validate(json.loads(result.text), json.loads(each.grammar.text))
        checked += 1
    return checked


@pytest.mark.parametrize(
    ("k", "options"),
    [
        (0, {}),
        (1, {}),
        (3, {}),
        (3, {"micro_batching": "always"}),
        (1, {"plans_in_flight": 2}),
        (3, {"plans_in_flight": 3}),
        (2, {"token_budget": 9}),
        (3, {"draft_model": DRAFT}),
    ],
)
def test_texts_are_valid_and_do_not_depend_on_the_shape_of_the_steps(k: int, options: dict[str, Any]) -> None:
    prompts, params = requests()
    with engine(speculative_tokens=k, **options) as made:
        results = made.generate(prompts, params)
        assert made.stats().pages_free == made.stats().pages
        assert all(drafted > 0 for drafted in made.stats().drafted)
    assert ids(results) == one_by_one()
    assert check_schemas(results, params) == 2 * len(SCHEMAS)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    ("tensor", "data", "k", "micro_batching", "draft"),
    [(2, 1, 1, "never", None), (1, 2, 3, "always", None), (2, 2, 2, "always", None), (2, 1, 3, "never", DRAFT)],
)
def test_every_layout_keeps_to_the_grammar_and_gives_the_text_of_one_rank(
    tensor: int, data: int, k: int, micro_batching: str, draft: Path | None
) -> None:
    prompts, params = requests()
    layout = {"tensor_parallel": tensor, "data_parallel": data, "micro_batching": micro_batching}
    with engine(speculative_tokens=k, draft_model=draft, page_size=4, pages=60, max_running=4, **layout) as made:
        results = made.generate(prompts, params)
    assert ids(results) == one_by_one()
    assert check_schemas(results, params) == 2 * len(SCHEMAS)


@pytest.mark.parametrize(("k", "plans"), [(0, 1), (2, 1), (1, 3)])
def test_a_preempted_answer_goes_on_in_its_grammar(k: int, plans: int) -> None:
    prompts, params = requests()
    with engine(speculative_tokens=k, page_size=4, pages=45, plans_in_flight=plans) as made:
        results = made.generate(prompts, params)
        assert made.stats().preemptions > 3, "the cache was large enough: nothing was preempted"
    assert ids(results) == one_by_one()


def test_a_cached_prompt_changes_nothing() -> None:
    prompts, params = requests()
    with engine(speculative_tokens=1, page_size=4) as made:
        first, second = made.generate(prompts, params), made.generate(prompts, params)
    assert ids(first) == ids(second) == one_by_one()
    assert all(result.cached_tokens > 0 for result in second)


def test_unseeded_texts_under_the_rejection_rule_are_valid() -> None:
    params = [
        SamplingParams(temperature=temperature, max_tokens=MOST, n=3, grammar=Grammar.json_schema(schema))
        for schema in SCHEMAS.values()
        for temperature in (1.0, 3.0)
    ]
    with engine(speculative_tokens=3) as made:
        prompt = made.tokenizer.encode(QUESTIONS[0])
        results = made.generate([prompt] * len(params), params)
    for result, each in zip(results, params, strict=True):
        assert each.grammar is not None
        for completion in result.completions:
            assert completion.finish_reason == "stop", completion.text
            jsonschema.validate(json.loads(completion.text), json.loads(each.grammar.text))


def test_drafts_keep_to_the_grammar_and_are_accepted() -> None:
    """What a grammar leaves no choice about is always accepted."""
    grammar = Grammar.regex("What there is to say here has been said by others before us, and better")
    with engine(speculative_tokens=3) as made:
        [result] = made.generate(
            [made.tokenizer.encode(QUESTIONS[0])], SamplingParams(max_tokens=MOST, grammar=grammar)
        )
        assert made.generate(QUESTIONS[0], SamplingParams(max_tokens=40))[0].finish_reason  # the slot is free of it
    assert result.text == "What there is to say here has been said by others before us, and better"
    assert result.acceptance.drafted[2] >= 4
    # tokens that spell the same text differ: a draft may choose another one
    assert result.acceptance.rates[0] > 0.5


def test_an_object_of_any_kind_is_json() -> None:
    """It may be cut off by its length: what there is of it is the beginning of an object."""
    with engine(speculative_tokens=1) as made:
        params = [SamplingParams(temperature=1, seed=s, max_tokens=60, grammar=Grammar.json_object()) for s in range(8)]
        results = made.generate([made.tokenizer.encode("{")] * 8, params)
    for result in results:
        assert result.text.startswith("{")
        assert result.finish_reason == "length" or isinstance(json.loads(result.text), dict)


@pytest.mark.parametrize("min_tokens", [0, 40])
def test_the_text_ends_where_the_grammar_ends(min_tokens: int) -> None:
    """Also before min_tokens: there is nothing else to say."""
    params = SamplingParams(temperature=0, max_tokens=50, min_tokens=min_tokens, grammar=Grammar.choice(["yes", "no"]))
    with engine(speculative_tokens=2) as made:
        [result] = made.generate(["Is it?"], params)
    assert result.text in ("yes", "no")
    assert result.finish_reason == "stop"


def test_what_does_not_compile_is_refused_before_anything_is_queued() -> None:
    with engine(speculative_tokens=0) as made:
        with pytest.raises(InvalidRequestError, match="Unclosed") as refused:
            made.generate("x", SamplingParams(grammar=Grammar.regex("[a", field="guided_regex")))
        assert refused.value.field == "guided_regex"
        assert made.stats().waiting == made.stats().running == 0
    with pytest.raises(InvalidRequestError, match="ignore_eos") as refused:
        SamplingParams(ignore_eos=True, grammar=Grammar.json_object())
    assert refused.value.field == "ignore_eos"
    with pytest.raises(InvalidRequestError, match="must be a Grammar"):
        SamplingParams(grammar="{}")  # type: ignore[arg-type]
