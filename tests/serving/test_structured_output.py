"""Structured output over HTTP, through OpenAI's client."""

import json
import re
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel, Field
from support.service import MODEL

from raysonar import Engine, Grammar, SamplingParams

MESSAGES: list[Any] = [{"role": "user", "content": "What is the capital of Norway?"}]


class City(BaseModel):
    name: str = Field(max_length=6)
    kind: Literal["capital", "town"]
    people: int = Field(ge=0, le=999)
    sisters: list[Literal["Bergen", "Oslo"]] = Field(max_length=2)


def test_parse_gives_a_pydantic_model(client: openai.OpenAI) -> None:
    for temperature in (0.0, 1.0):
        answer = client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, temperature=temperature, seed=4, max_tokens=150, response_format=City
        )
        assert answer.choices[0].finish_reason == "stop"
        parsed = answer.choices[0].message.parsed
        assert isinstance(parsed, City)
        assert json.loads(answer.choices[0].message.content or "") == parsed.model_dump()


def test_a_streamed_answer_is_the_engines(client: openai.OpenAI, engine: Engine) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]}
    params = SamplingParams(temperature=0.8, seed=5, max_tokens=60, grammar=Grammar.json_schema(schema))
    [expected] = engine.generate([engine.tokenizer.render_chat(MESSAGES)], params)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        temperature=0.8,
        seed=5,
        max_tokens=60,
        stream=True,
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == expected.text
    assert set(json.loads(text)) == {"a"}


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"guided_regex": r"\d{3}-\d{2}"}, r"\d{3}-\d{2}"),
        ({"guided_choice": ["Oslo", "Bergen"]}, "Oslo|Bergen"),
        ({"guided_grammar": 'root ::= "<" root ">" | [a-c]'}, "<*[a-c]>*"),
        ({"structured_outputs": {"regex": "(ab){2}"}}, "(ab){2}"),
        ({"guided_json": {"enum": ["x", 1]}}, '"x"|1'),
    ],
)
def test_vllms_parameters_are_kept(client: openai.OpenAI, asked: dict[str, Any], pattern: str) -> None:
    answer = client.completions.create(model=MODEL, prompt="It is", seed=1, max_tokens=80, extra_body=asked)
    assert answer.choices[0].finish_reason == "stop"
    assert re.fullmatch(pattern, answer.choices[0].text)


def test_what_does_not_compile_is_a_400_with_the_parameter(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="Unclosed") as refused:
        client.completions.create(model=MODEL, prompt="x", extra_body={"guided_regex": "[a"})
    assert refused.value.param == "guided_regex"
    with pytest.raises(openai.BadRequestError, match="not is not supported") as refused:
        client.chat.completions.create(
            model=MODEL,
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}},
        )
    assert refused.value.param == "response_format"
