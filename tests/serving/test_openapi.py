"""The published schema is right: schemathesis asks for everything that it allows, and much that it forbids."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import jsonschema
import pytest
import schemathesis
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import positive_data_acceptance
from support.scripted import say
from support.service import Service

from raysonar.serving import openapi

NAME = "described"
TEMPLATE = """\
{#- Short, but with all that the ingress looks for: <｜tool▁calls▁begin｜>, </think>. -#}
{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor -%}
{%- for message in messages %}{{ message.content }}{% endfor -%}
{{- '<think>' if thinking -}}
"""
EXAMPLES = 60
_NOT_IN_A_SCHEMA = [positive_data_acceptance]
"""Not all that is refused can be told by a schema: ids beyond the vocabulary, too long prompts, and rules of several
parameters."""


@pytest.fixture(scope="module")
def described(start_scripted: Callable[..., Service]) -> Service:
    """A model that answers at once and has room for little, so that whatever is asked takes no time."""
    return start_scripted(NAME, TEMPLATE, max_model_len=512)


@pytest.fixture(scope="module")
def document(described: Service) -> dict[str, Any]:
    return httpx.get(f"{described.url}/openapi.json").json()


def optional_parameters(path: str) -> list[str]:
    """Of a route's body."""
    described = openapi.document(NAME)
    operation = described["paths"][path].get("post")
    if operation is None:
        return []
    name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
    schema = described["components"]["schemas"][name]
    return sorted(schema["properties"].keys() - set(schema.get("required", [])) - {"prompt", "messages"})


OPERATIONS = [
    (path, method)
    for path, methods in openapi.document(NAME)["paths"].items()
    for method in methods
    if path != "/metrics"
]


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.value)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_the_service_does_what_its_schema_says(described: Service, path: str, method: str, mode: GenerationMode):
    """Answers have the published shapes and statuses, what the schema forbids is refused, and nothing is a 500."""
    api = schemathesis.openapi.from_dict(openapi.document(NAME))
    api.config.update(base_url=described.url)
    operation = api[path][method]
    if mode.is_negative and not operation.body:
        pytest.skip("takes nothing that could be wrong")
    optional = optional_parameters(path) or [""]
    statuses: Counter[int] = Counter()

    @seed(1)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy(generation_mode=mode), kept=st.sets(st.sampled_from(optional), max_size=3))
    def ask(case: schemathesis.Case, kept: set[str]) -> None:
        if mode.is_positive and operation.body:  # a few parameters at a time: more rarely fit together
            case.body = {name: value for name, value in case.body.items() if name in kept or name not in optional}
        if mode.is_positive and path == "/v1/steps/trace":
            case.body["timeout"] = 0.01  # there are no steps meanwhile
        response = case.call_and_validate(excluded_checks=_NOT_IN_A_SCHEMA, timeout=30)
        statuses[response.status_code] += 1

    ask()
    assert sum(statuses.values()) > EXAMPLES // 2 or not operation.body
    if mode.is_negative:
        assert set(statuses) <= {400, 404}
    else:
        assert statuses[200], "nothing that the schema allows was answered"


def validate(document: dict[str, Any], name: str, value: object) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    jsonschema.Draft202012Validator(schema).validate(value)


CALLS = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
CHAT = {
    "messages": [{"role": "user", "content": say(f"a</think>b{CALLS}")}],
    "tools": [{"type": "function", "function": {"name": "f"}}],
    "chat_template_kwargs": {"thinking": True},
}
COMPLETION = {"prompt": "a", "max_tokens": 2, "echo": True}


@pytest.mark.parametrize(
    ("path", "body", "whole", "chunk"),
    [
        ("/v1/chat/completions", CHAT | {"return_token_origins": True}, "ChatCompletion", "ChatCompletionChunk"),
        ("/v1/completions", COMPLETION | {"return_token_origins": True}, "Completion", "Completion"),
        ("/v1/chat/completions", CHAT, "ChatCompletion", "ChatCompletionChunk"),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}, "ChatCompletion", "ChatCompletionChunk"),
        ("/v1/completions", COMPLETION | {"logprobs": 2}, "Completion", "Completion"),
        ("/v1/completions", COMPLETION, "Completion", "Completion"),
    ],
)
def test_answers_and_events_of_streams_have_the_published_shapes(
    described: Service, document: dict[str, Any], path: str, body: dict[str, Any], whole: str, chunk: str
):
    body = {"model": NAME, **body}
    answer = httpx.post(f"{described.url}{path}", json=body | {"prompt_logprobs": 1})
    validate(document, whole, answer.json())
    streamed = httpx.post(
        f"{described.url}{path}", json=body | {"stream": True, "stream_options": {"include_usage": True}}
    )
    *events, done, end = streamed.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    for each in chunks:
        validate(document, chunk, each)
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    if path.endswith("chat/completions"):
        keys = {key for each in chunks for choice in each["choices"] for key in choice["delta"]}
        assert keys == {"role", "content", "reasoning_content", "tool_calls"}
        assert answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "f"


def test_tokens_and_texts_have_the_published_shapes(described: Service, document: dict[str, Any]):
    tokens = httpx.post(f"{described.url}/tokenize", json={"prompt": "hi", "return_token_strs": True}).json()
    validate(document, "Tokens", tokens)
    text = httpx.post(f"{described.url}/detokenize", json={"tokens": tokens["tokens"]}).json()
    validate(document, "Detokenized", text)
    assert text["prompt"].endswith("hi")


def test_every_route_and_parameter_is_published(document: dict[str, Any]):
    assert set(document["paths"]) == {
        "/v1/models",
        "/v1/models/{model}",
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
        "/v1/steps",
        "/v1/steps/trace",
        "/health",
        "/ready",
        "/metrics",
    }
    for name, least in (("ChatBody", "tools"), ("CompletionBody", "echo"), ("ChatBody", "response_format")):
        assert least in document["components"]["schemas"][name]["properties"]
    jsonschema.Draft202012Validator.check_schema(document["components"]["schemas"])
