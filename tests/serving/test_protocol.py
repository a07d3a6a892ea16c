"""What the endpoints' bodies come to."""

import dataclasses
import json
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from raysonar.driver.params import SamplingParams
from raysonar.errors import EngineFailedError, InvalidRequestError, QueueFullError
from raysonar.grammar import Grammar
from raysonar.serving.generation import Chat
from raysonar.serving.problems import problem_of
from raysonar.serving.protocol import ChatBody, CompletionBody

SAMPLING: dict[str, Any] = {
    "n": 3,
    "temperature": 0.5,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "presence_penalty": 0.2,
    "frequency_penalty": -0.3,
    "repetition_penalty": 1.1,
    "logit_bias": {"5": 2.5},
    "seed": 12,
    "stop": ["x", "y"],
    "stop_token_ids": [4],
    "include_stop_str_in_output": True,
    "ignore_eos": True,
    "min_tokens": 2,
    "max_tokens": 9,
    "prompt_logprobs": 1,
    "skip_special_tokens": False,
}
EXPECTED = {**SAMPLING, "logit_bias": {5: 2.5}}


def completion(**values: Any) -> CompletionBody:
    return CompletionBody.model_validate_json(json.dumps({"model": "m", "prompt": "hi"} | values))


def chat(**values: Any) -> ChatBody:
    messages = [{"role": "user", "content": "hi"}]
    return ChatBody.model_validate_json(json.dumps({"model": "m", "messages": messages} | values))


def test_every_sampling_parameter_can_be_sent():
    fields = {field.name for field in dataclasses.fields(SamplingParams)}
    assert fields == {*SAMPLING, "logprobs", "grammar"}
    assert completion(**SAMPLING, logprobs=2).sampling() == SamplingParams(**EXPECTED, logprobs=2)
    assert chat(**SAMPLING, logprobs=True, top_logprobs=2).sampling() == SamplingParams(**EXPECTED, logprobs=2)


def test_null_is_the_default():
    nulls = dict.fromkeys([*SAMPLING, "logprobs", "stream", "echo", "suffix", "user", "stream_options"])
    assert completion(**nulls).sampling() == SamplingParams(max_tokens=16)
    nulls = dict.fromkeys([*SAMPLING, "logprobs", "top_logprobs", "tools", "response_format", "store"])
    assert chat(**nulls).sampling() == SamplingParams()


def test_chat_logprobs_without_top_are_the_chosen_tokens_only():
    assert chat(logprobs=True).sampling().logprobs == 0
    assert chat(logprobs=False).sampling().logprobs is None


def test_echo_with_logprobs_asks_for_the_prompts():
    assert completion(echo=True, logprobs=3).sampling().prompt_logprobs == 3
    assert completion(echo=True).sampling().prompt_logprobs is None
    assert completion(logprobs=3).sampling().prompt_logprobs is None


def test_max_completion_tokens_is_max_tokens():
    assert chat(max_completion_tokens=7).sampling().max_tokens == 7
    assert chat(max_completion_tokens=7, max_tokens=7).sampling().max_tokens == 7


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
)
def test_a_prompt_has_four_shapes(prompt: object, prompts: list[object]):
    assert completion(prompt=prompt).prompts == prompts


def test_messages_become_a_chat_for_the_template():
    body = chat(
        messages=[
            {"role": "developer", "content": "d"},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        ]
    )
    assert body.prompts == [Chat(({"role": "system", "content": "d"}, {"role": "user", "content": "ab"}))]


def test_best_of_is_taken_when_it_is_n():
    assert completion(best_of=2, n=2).sampling().n == 2
    assert completion(best_of=1).sampling().n == 1


@given(name=st.text(string.ascii_lowercase + "_", min_size=1, max_size=12))
def test_any_unknown_parameter_is_refused_by_its_name(name: str):
    known = {*CompletionBody.model_fields, *ChatBody.model_fields}
    name = f"x_{name}"
    assert name not in known
    with pytest.raises(ValidationError) as refused:
        completion(**{name: 1})
    problem = problem_of(refused.value)
    assert (problem.status, problem.param, problem.code) == (400, name, "unknown_parameter")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(
    name=st.sampled_from(sorted({*CompletionBody.model_fields, "tools", "suffix", "response_format", "user"})),
    value=JSON_VALUES,
)
def test_any_value_is_taken_or_refused_as_a_400(name: str, value: object):
    """Nothing a client sends as a parameter can come out as the server's own error."""
    try:
        completion(**{name: value}).sampling()
    except (ValidationError, InvalidRequestError) as error:
        problem = problem_of(error)
        assert problem.status == 400
        assert problem.param is not None
        assert json.dumps(problem.body())


def test_a_full_queue_and_a_dead_engine_may_be_tried_again():
    for error in (QueueFullError("full"), EngineFailedError("dead"), TimeoutError()):
        problem = problem_of(error)
        assert (problem.status, problem.type) == (503, "server_error")
        assert problem.headers == {"Retry-After": "1"}


def test_an_unforeseen_error_is_a_500_that_says_nothing_of_the_inside():
    problem = problem_of(KeyError("secret"))
    assert problem.status == 500
    assert "secret" not in json.dumps(problem.body())


PERSON = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar.json_object()),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "p", "strict": True, "schema": PERSON},
                }
            },
            Grammar.json_schema(PERSON),
        ),
        ({"guided_json": PERSON}, Grammar.json_schema(PERSON)),
        ({"guided_json": json.dumps(PERSON)}, Grammar.json_schema(PERSON)),
        ({"guided_regex": "a+"}, Grammar.regex("a+")),
        ({"guided_choice": ["a", "b"]}, Grammar.choice(["a", "b"])),
        ({"guided_grammar": 'root ::= "a"'}, Grammar.ebnf('root ::= "a"')),
        ({"structured_outputs": {"json": PERSON}}, Grammar.json_schema(PERSON)),
        ({"structured_outputs": {"json_object": True}}, Grammar.json_object()),
        ({"structured_outputs": {"regex": "a+", "json": None}}, Grammar.regex("a+")),
        ({"structured_outputs": {"choice": ["a"]}}, Grammar.choice(["a"])),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar.ebnf('root ::= "a"')),
        ({"response_format": {"type": "text"}, "guided_regex": "a+"}, Grammar.regex("a+")),
    ],
)
def test_structured_output_has_many_names(sent: dict[str, Any], expected: Grammar | None):
    for body in (completion(**sent), chat(**sent)):
        grammar = body.sampling().grammar
        assert grammar == expected
        assert grammar is None or grammar.field in sent


@pytest.mark.parametrize(
    ("sent", "param"),
    [
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "p"}}}, "response_format"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs"),
        ({"guided_json": {"type": "strin"}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": "a"}, "guided_choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"response_format": {"type": "json_object", "more": 1}}, "response_format"),
    ],
)
def test_structured_output_that_cannot_be_is_refused_by_its_name(sent: dict[str, Any], param: str):
    for make in (completion, chat):
        with pytest.raises((ValidationError, InvalidRequestError)) as refused:
            make(**sent).sampling()
        problem = problem_of(refused.value)
        assert (problem.status, (problem.param or "").split(".")[0]) == (400, param)


def test_functions_and_structured_output_are_asked_for_one_at_a_time():
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    assert chat(guided_regex="a", tools=tools, tool_choice="none").sampling().grammar == Grammar.regex("a")
    assert chat(response_format={"type": "text"}, tools=tools).sampling().grammar is None
    with pytest.raises(ValidationError, match="may call functions") as refused:
        chat(guided_regex="a", tools=tools)
    assert problem_of(refused.value).param == "guided_regex"
