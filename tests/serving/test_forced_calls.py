"""Forced calls and strict functions over HTTP, with OpenAI's client and random models: nobody taught them to call."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from support.checkpoints import make_deepseek_v3
from support.scripted import MARKS
from support.service import Deploy, Service
from support.tokenizers import write_tokenizer

from raysonar.serving.app import build_app

TEMPLATE = """\
{#- Short, but with all that the ingress looks for: <｜tool▁calls▁begin｜>, </think>. -#}
{%- for tool in tools or [] %}{{ tool.function.name }} {% endfor -%}
{%- for message in messages %}{{ message.content }}{% endfor -%}
{{- '<think>' if thinking -}}
"""
V3, V31 = "held_v3", "held_v31"
SERVED = {V3: (TEMPLATE + "{#- ```json -#}", False, 0), V31: (TEMPLATE, True, 1)}
"""Template, whether the marks are special tokens, draft tokens."""
THINKING = {"chat_template_kwargs": {"thinking": True}}


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=5)
    days: list[int] = Field(max_length=2)


SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 5}, "in": {"enum": ["C", "F"]}},
        "required": ["city", "in"],
        "additionalProperties": False,
    },
    "count": {
        "type": "object",
        "properties": {"to": {"type": "integer", "minimum": 1, "maximum": 300}},
        "required": ["to"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": each}} for name, each in SCHEMAS.items()]


@pytest.fixture(scope="module")
def services(deploy: Deploy, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Service]:
    """A random DeepSeek-V3 for each format."""
    made = {}
    for name, (template, special, drafts) in SERVED.items():
        folder = make_deepseek_v3(tmp_path_factory.mktemp("held") / name, mtp=1, vocab_size=420, tokenizer=False)
        write_tokenizer(folder, template=template, template_file=True, added=MARKS, special=special)
        args = {"engine": {"model": str(folder), "speculation": {"tokens": drafts}}}
        made[name] = deploy(name, build_app(args))
    return made


@pytest.fixture(params=SERVED)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def client(services: dict[str, Service], model: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{services[model].url}/v1", api_key="any", max_retries=0, timeout=60.0) as client:
        yield client


def token_of(service: Service, mark: str) -> str:
    body = {"prompt": mark, "add_special_tokens": False}
    [token] = httpx.post(f"{service.url}/tokenize", json=body).json()["tokens"]
    return str(token)


def ask(client: openai.OpenAI, model: str, seed: int, **options: Any) -> Any:
    messages = [{"role": "user", "content": "How is it?"}]
    values = {"tools": TOOLS, "temperature": 1, "seed": seed, "max_tokens": 400} | options
    return client.chat.completions.create(model=model, messages=messages, **values)


def valid_calls(choice: Any) -> list[str]:
    """The names of an answer's calls, all of them valid."""
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in choice.message.tool_calls]


def test_required_gives_calls_that_are_valid(client: openai.OpenAI, model: str):
    given = set()
    for seed in range(6):
        choice = ask(client, model, seed, tool_choice="required").choices[0]
        assert choice.message.content is None
        assert valid_calls(choice)
        given.update(call.function.arguments for call in choice.message.tool_calls)
    assert len(given) > 4


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI, model: str):
    for seed in range(3):
        whole = ask(client, model, seed, tool_choice="required").choices[0].message.tool_calls
        calls: list[list[str]] = []
        for chunk in ask(client, model, seed, tool_choice="required", stream=True):
            assert not chunk.choices[0].delta.content
            for call in chunk.choices[0].delta.tool_calls or []:
                if call.function.name is not None:
                    calls.append([call.function.name, ""])
                calls[call.index][1] += call.function.arguments or ""
        assert calls == [[call.function.name, call.function.arguments] for call in whole]


def test_without_parallel_calls_there_is_exactly_one(client: openai.OpenAI, model: str):
    for seed in range(6):
        answer = ask(client, model, seed, tool_choice="required", parallel_tool_calls=False)
        assert len(valid_calls(answer.choices[0])) == 1
        assert answer.usage.completion_tokens < 100, "no second call was made and dropped"


def test_a_named_function_is_called_once(client: openai.OpenAI, model: str):
    choice = {"type": "function", "function": {"name": "count"}}
    for seed in range(4):
        assert valid_calls(ask(client, model, seed, tool_choice=choice).choices[0]) == ["count"]


def test_answers_without_a_seed_are_held_too(client: openai.OpenAI, model: str):
    """Under the rejection rule."""
    answer = ask(client, model, 0, tool_choice="required", n=4, extra_body={"seed": None})
    for choice in answer.choices:
        assert valid_calls(choice)


def test_a_strict_function_that_is_called_gets_valid_arguments(
    client: openai.OpenAI, model: str, services: dict[str, Service]
):
    """The first token of a call is made likely; what follows is the model's choice, and its grammar's."""
    strict = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    bias = {"logit_bias": {token_of(services[model], "<｜tool▁calls▁begin｜>"): 100}}
    for seed in range(3):
        assert valid_calls(ask(client, model, seed, tools=strict, **bias).choices[0])
    free = ask(client, model, 0, tools=strict, max_tokens=20).choices[0]
    assert (free.finish_reason, free.message.tool_calls) == ("length", None)
    loose = ask(client, model, 0, max_tokens=20, **bias).choices[0]
    assert loose.message.tool_calls is None, "nobody has taught it the format"


def test_openais_parsing_helper_parses_a_forced_call(client: openai.OpenAI, model: str):
    completion = client.chat.completions.parse(
        model=model,
        messages=[{"role": "user", "content": "How is it?"}],
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=1,
        max_tokens=400,
    )
    [call] = completion.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Weather)


def test_reasoning_comes_before_what_is_held(client: openai.OpenAI, model: str, services: dict[str, Service]):
    """The end of the reasoning is made likely, or it would take a random model for ever."""
    bias = {"logit_bias": {token_of(services[model], "</think>"): 4}, "extra_body": THINKING}
    thought = 0
    for seed in range(4):
        choice = ask(client, model, seed, tool_choice="required", **bias).choices[0]
        thought += bool(choice.message.reasoning_content)
        assert choice.message.content is None
        assert valid_calls(choice)
        form = {"type": "json_schema", "json_schema": {"name": "count", "schema": SCHEMAS["count"]}}
        message = ask(client, model, seed, tools=openai.omit, response_format=form, **bias).choices[0].message
        thought += bool(message.reasoning_content)
        jsonschema.validate(json.loads(message.content), SCHEMAS["count"])
    assert thought > 4


def test_parameters_that_cannot_be_kept_are_refused_by_name(client: openai.OpenAI, model: str):
    tools = [TOOLS[0], {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}]
    with pytest.raises(openai.BadRequestError, match="not is not supported") as refused:
        ask(client, model, 0, tools=tools, tool_choice="required")
    assert refused.value.param == "tools[1].function.parameters"
    with pytest.raises(openai.BadRequestError, match="ignore_eos cannot be asked for with tool_choice"):
        ask(client, model, 0, tool_choice="required", extra_body={"ignore_eos": True})
