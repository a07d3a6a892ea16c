"""The service over raw HTTP: framing, refusals, disconnects, probes, overload, and a driver that dies."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import ray
from support.service import APPLICATION, MAX_ONGOING, MODEL, SLOTS, Service

from raysonar import Engine, SamplingParams
from raysonar.config import LimitsConfig

MAX_BODY_BYTES = LimitsConfig().max_body_bytes
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
LONG = {"model": MODEL, "prompt": "The", "max_tokens": 480, "ignore_eos": True}
"""As long an answer as the model can give."""
MESSAGES = [{"role": "user", "content": "hi"}]


def events(lines: Iterator[str]) -> Iterator[str]:
    """The data of server-sent events; anything but `data: ...` and the empty line after it is an error."""
    for line in lines:
        assert line.startswith("data: ")
        assert next(lines) == ""
        yield line.removeprefix("data: ")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "The", "max_tokens": 9, "ignore_eos": True}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 9, "ignore_eos": True}),
    ],
)
def test_a_stream_is_server_sent_events_that_end_with_done(http: httpx.Client, path: str, body: dict[str, Any]):
    options = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}}
    with http.stream("POST", path, json=body | options) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        *chunks, usage, done = events(response.iter_lines())
    assert done == "[DONE]"
    assert json.loads(usage)["choices"] == []
    assert json.loads(usage)["usage"]["completion_tokens"] == 9
    assert [json.loads(chunk)["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "length"]


def test_characters_of_several_tokens_arrive_whole(http: httpx.Client, engine: Engine):
    """Each character of this answer is at least two tokens; a chunk must never hold a part of one."""
    pieces = [engine.tokenizer.encode(text, add_special_tokens=False) for text in "ÿþ"]
    assert all(len(piece) == 2 for piece in pieces)
    wanted = {token for piece in pieces for token in piece}
    params = {"prompt": "The", "max_tokens": 64, "seed": 3, "temperature": 3, "ignore_eos": True}
    bias = {str(token): 60 for token in wanted}
    options = SamplingParams(
        seed=3, temperature=3, max_tokens=64, ignore_eos=True, logit_bias=dict.fromkeys(wanted, 60)
    )
    expected = engine.generate("The", options)[0].text
    assert "ÿ" in expected
    assert "þ" in expected
    with http.stream(
        "POST", COMPLETIONS, json={"model": MODEL, "stream": True, "logit_bias": bias, **params}
    ) as response:
        *chunks, _ = events(response.iter_lines())
    texts = [json.loads(chunk)["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == expected
    assert len(texts) > 8


REFUSED = [
    (COMPLETIONS, {"prompt": None}, "prompt"),
    (COMPLETIONS, {"prompt": []}, "prompt"),
    (COMPLETIONS, {"prompt": [[]]}, "prompt"),
    (COMPLETIONS, {"prompt": ["a", [1]]}, "prompt"),
    (COMPLETIONS, {"prompt": [-1]}, "prompt"),
    (COMPLETIONS, {"prompt": [99999]}, "prompt"),
    (COMPLETIONS, {"prompt": [5] * 512}, "prompt"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": "5"}, "max_tokens"),
    (COMPLETIONS, {"max_tokens": 4096}, "max_tokens"),
    (COMPLETIONS, {"temperature": -0.1}, "temperature"),
    (COMPLETIONS, {"top_p": 0}, "top_p"),
    (COMPLETIONS, {"top_k": -2}, "top_k"),
    (COMPLETIONS, {"min_p": 1.5}, "min_p"),
    (COMPLETIONS, {"presence_penalty": 3}, "presence_penalty"),
    (COMPLETIONS, {"frequency_penalty": -3}, "frequency_penalty"),
    (COMPLETIONS, {"repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETIONS, {"n": 0}, "n"),
    (COMPLETIONS, {"n": True}, "n"),
    (COMPLETIONS, {"seed": 1.5}, "seed"),
    (COMPLETIONS, {"logprobs": 101}, "logprobs"),
    (COMPLETIONS, {"logprobs": True}, "logprobs"),
    (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"5": 101}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"99999": 1}}, "logit_bias"),
    (COMPLETIONS, {"stop": ["a", 1]}, "stop"),
    (COMPLETIONS, {"stop": ""}, "stop"),
    (COMPLETIONS, {"stop_token_ids": [99999]}, "stop_token_ids"),
    (COMPLETIONS, {"min_tokens": 17}, "min_tokens"),
    (COMPLETIONS, {"best_of": 2}, "best_of"),
    (COMPLETIONS, {"suffix": "x"}, "suffix"),
    (COMPLETIONS, {"echo": "yes"}, "echo"),
    (COMPLETIONS, {"stream": 1}, "stream"),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
    (COMPLETIONS, {"stream": True, "stream_options": {"nope": 1}}, "stream_options.nope"),
    (COMPLETIONS, {"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
    (COMPLETIONS, {"messages": MESSAGES}, "messages"),
    (COMPLETIONS, {"model": None}, "model"),
    (COMPLETIONS, {"nope": 1}, "nope"),
    (CHAT, {"messages": None}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": [{"role": "wizard", "content": "hi"}]}, "messages[0].role"),
    (CHAT, {"messages": [*MESSAGES, {"role": "user"}]}, "messages[1].content"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "hi", "name": "Ann"}]}, "messages[0].name"),
    (CHAT, {"messages": [*MESSAGES, {"role": "system", "content": "late"}]}, "messages"),
    (CHAT, {"max_completion_tokens": 0}, "max_completion_tokens"),
    (CHAT, {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    (CHAT, {"logprobs": 2}, "logprobs"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"logprobs": True, "top_logprobs": 101}, "top_logprobs"),
    (CHAT, {"response_format": {"type": "json_object"}, "ignore_eos": True}, "ignore_eos"),
    (CHAT, {"messages": [{"role": "tool", "content": None}]}, "messages[0].content"),
    (CHAT, {"messages": [{"role": "user", "content": "hi", "tool_call_id": "1"}]}, "messages[0].tool_call_id"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools[0].function.name"),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (CHAT, {"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    (CHAT, {"parallel_tool_calls": "no"}, "parallel_tool_calls"),
    (CHAT, {"add_generation_prompt": True, "continue_final_message": True}, "add_generation_prompt"),
    (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": 5}, "chat_template_kwargs"),
    (CHAT, {"chat_template": "{{ messages }}"}, "chat_template"),
    (CHAT, {"priority": 2**31}, "priority"),
    (CHAT, {"skip_special_tokens": 0}, "skip_special_tokens"),
    (CHAT, {"spaces_between_special_tokens": True}, "spaces_between_special_tokens"),
    (CHAT, {"audio": {"voice": "alloy"}}, "audio"),
    (CHAT, {"store": True}, "store"),
    (CHAT, {"prompt": "hi"}, "prompt"),
]


@pytest.mark.parametrize(("path", "fault", "param"), REFUSED, ids=lambda value: str(value)[:60])
def test_what_cannot_be_honoured_is_refused_by_name(http: httpx.Client, path: str, fault: dict[str, Any], param: str):
    body = {"model": MODEL, **({"prompt": "hi"} if path == COMPLETIONS else {"messages": MESSAGES})}
    response = http.post(path, json=body | fault)
    assert response.status_code == 400
    error = response.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert param.split(".")[0].split("[")[0] in error["message"]
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
def test_what_changes_no_answer_is_taken(http: httpx.Client, stream: bool):
    body = {
        "model": MODEL,
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": "hello", "refusal": None, "tool_calls": None},
            {"role": "user", "content": "hi"},
        ],
        "max_tokens": 2,
        "stream": stream,
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "tools": None,
        "response_format": {"type": "text"},
        "modalities": ["text"],
        "parallel_tool_calls": True,
    }
    assert http.post(CHAT, json=body).status_code == 200


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"null", b"\xff", b'{"model": "tiny", "prompt": "\\ud800"}', b'{"prompt": "a"} x']
)
def test_a_body_that_is_no_json_object_is_refused(http: httpx.Client, body: bytes):
    response = http.post(COMPLETIONS, content=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert "JSON" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/nope", 404), ("GET", "/v1/models/other", 404), ("GET", COMPLETIONS, 405), ("DELETE", "/v1/models", 405)],
)
def test_unknown_routes_have_openais_error_shape(http: httpx.Client, method: str, path: str, status: int):
    response = http.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert response.headers.get("allow") == (
        {COMPLETIONS: "POST", "/v1/models": "GET"}[path] if status == 405 else None
    )


def test_too_large_a_body_is_refused(http: httpx.Client):
    pieces = (b" " * (1 << 20) for _ in range(MAX_BODY_BYTES // (1 << 20) + 1))
    for content in (b" " * (MAX_BODY_BYTES + 1), pieces):
        response = http.post(COMPLETIONS, content=content)
        assert response.status_code == 413
        assert str(MAX_BODY_BYTES) in response.json()["error"]["message"]


def test_prompt_logprobs_are_vllms_shape(http: httpx.Client, engine: Engine):
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    expected = engine.generate("hi there", params)[0]
    assert expected.prompt_logprobs is not None
    body = {"model": MODEL, "prompt": "hi there", "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
    first, *rest = http.post(COMPLETIONS, json=body).json()["choices"][0]["prompt_logprobs"]
    assert first is None
    assert len(rest) == len(expected.prompt_token_ids) - 1
    for got, want, token in zip(rest, expected.prompt_logprobs[1:], expected.prompt_token_ids[1:], strict=True):
        assert want is not None
        assert next(iter(got)) == str(token)
        assert set(got) == {str(each) for each in {token, *want.top}}
        assert got[str(token)]["logprob"] == pytest.approx(want.logprob, abs=1e-3)


def test_texts_and_chats_are_tokenized_as_they_would_be_continued(http: httpx.Client, engine: Engine):
    tokenizer = engine.tokenizer
    whole = http.post("/tokenize", json={"prompt": "hi thére", "return_token_strs": True}).json()
    tokens = tokenizer.encode("hi thére")
    assert (whole["tokens"], whole["count"], whole["max_model_len"]) == (tokens, len(tokens), engine.max_length)
    assert whole["token_strs"][0] == "<|bos|>"
    bare = http.post("/tokenize", json={"model": MODEL, "prompt": "hi", "add_special_tokens": False}).json()
    assert bare["tokens"] == tokenizer.encode("hi", add_special_tokens=False)
    assert bare["token_strs"] is None
    for prompted in (True, False):
        body = {"messages": MESSAGES, "add_generation_prompt": prompted}
        assert http.post("/tokenize", json=body).json()["tokens"] == tokenizer.render_chat(MESSAGES, prompted)
    answer = http.post(CHAT, json={"model": MODEL, "messages": MESSAGES, "max_tokens": 1}).json()
    assert answer["usage"]["prompt_tokens"] == len(tokenizer.render_chat(MESSAGES))


def test_tokens_are_detokenized_with_the_special_ones(http: httpx.Client, engine: Engine):
    tokens = engine.tokenizer.encode("Grüße 🙂")
    assert http.post("/detokenize", json={"model": MODEL, "tokens": tokens}).json() == {"prompt": "<|bos|>Grüße 🙂"}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES}, 400, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, 400, "continue_final_message"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools"),
        ("/tokenize", {"messages": [{"role": "system", "content": "a"}, *MESSAGES] * 2}, 400, "messages"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [99999]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens[0]"),
        ("/detokenize", {"tokens": [1], "nope": 1}, 400, "nope"),
    ],
)
def test_what_cannot_be_tokenized_is_refused_by_name(
    http: httpx.Client, path: str, body: dict[str, Any], status: int, param: str
):
    response = http.post(path, json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (status, param)


def test_a_request_id_comes_back_and_there_always_is_one(http: httpx.Client):
    body = {"model": MODEL, "prompt": "The", "max_tokens": 1}
    for path, sent in ((COMPLETIONS, body), (COMPLETIONS, {**body, "stream": True}), (COMPLETIONS, {}), ("/nope", {})):
        assert http.post(path, json=sent, headers={"X-Request-Id": "my-id.1"}).headers["x-request-id"] == "my-id.1"
    first, second = (http.post(COMPLETIONS, json=body).headers["x-request-id"] for _ in range(2))
    assert first != second


def test_special_tokens_are_shown_when_they_are_asked_for(http: httpx.Client):
    body = {"model": MODEL, "prompt": "The", "max_tokens": 3, "logit_bias": {"2": 100}, "temperature": 0}
    shown = http.post(COMPLETIONS, json=body | {"skip_special_tokens": False}).json()
    assert shown["choices"][0]["text"] == "<|user|>" * 3
    assert http.post(COMPLETIONS, json=body).json()["choices"][0]["text"] == ""


def test_the_last_message_can_be_gone_on_with(http: httpx.Client, engine: Engine):
    messages = [*MESSAGES, {"role": "assistant", "content": "The capital"}]
    options = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    body = {"model": MODEL, "messages": messages, "continue_final_message": True, **options}
    prompt = engine.tokenizer.chat_text(MESSAGES) + "The capital"
    expected = engine.generate(engine.tokenizer.encode(prompt, add_special_tokens=False), SamplingParams(**options))[0]
    answer = http.post(CHAT, json=body).json()
    assert answer["choices"][0]["message"]["content"] == expected.text
    assert answer["usage"]["prompt_tokens"] == len(expected.prompt_token_ids)


def test_why_an_answer_stopped_is_said(http: httpx.Client):
    body = {"model": MODEL, "prompt": "The", "temperature": 0, "logit_bias": {"70": 100}, "max_tokens": 5}
    choice = http.post(COMPLETIONS, json=body | {"stop_token_ids": [70]}).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 70)
    choice = http.post(COMPLETIONS, json=body).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("length", None)


def test_urgent_requests_are_served_first(service: Service):
    """All slots are taken when they arrive; who finishes first tells who was first."""

    async def ask() -> list[str]:
        finished: list[str] = []
        async with httpx.AsyncClient(base_url=service.url, timeout=60.0) as client:

            async def one(name: str, **body: Any) -> None:
                response = await client.post(COMPLETIONS, json={"model": MODEL, "ignore_eos": True, **body})
                assert response.status_code == 200
                finished.append(name)

            async with asyncio.timeout(60), asyncio.TaskGroup() as group:
                group.create_task(one("long", prompt=["The"] * SLOTS, max_tokens=400))
                await asyncio.to_thread(service.wait_until, lambda stats: stats.running == SLOTS)
                for waiting, (name, priority) in enumerate((("low", 5), ("middle", 0), ("high", -5)), 1):
                    prompts = [name] * SLOTS
                    group.create_task(one(name, prompt=prompts, max_tokens=50, priority=priority))
                    arrived = waiting * SLOTS
                    await asyncio.to_thread(service.wait_until, lambda stats: stats.waiting >= arrived)  # noqa: B023
        return finished

    assert asyncio.run(ask()) == ["long", "high", "middle", "low"]


def test_probes_answer(http: httpx.Client):
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}


def test_a_stream_that_the_client_leaves_frees_slot_and_pages(service: Service, http: httpx.Client):
    before = service.wait_until_idle()
    with http.stream("POST", COMPLETIONS, json=LONG | {"stream": True, "n": 3}) as response:
        received = events(response.iter_lines())
        next(received)
        assert service.stats().running > 0
    after = service.wait_until_idle()
    assert after.aborted == before.aborted + 1
    assert after.pages_free == after.pages
    assert after.generated_tokens - before.generated_tokens < 3 * 480


def test_a_whole_answer_that_the_client_does_not_wait_for_frees_slot_and_pages(service: Service, http: httpx.Client):
    before = service.wait_until_idle()
    with pytest.raises(httpx.ReadTimeout):
        http.post(COMPLETIONS, json=LONG | {"n": 8}, timeout=0.5)
    after = service.wait_until_idle()
    assert after.aborted == before.aborted + 1
    assert after.generated_tokens - before.generated_tokens < 8 * 480


def test_a_full_engine_queue_is_503(http: httpx.Client, service: Service):
    response = http.post(COMPLETIONS, json=LONG | {"n": 128})
    assert response.status_code == 503
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "overloaded"
    service.wait_until_idle()


async def _overload(service: Service) -> tuple[list[int], httpx.Response, int]:
    """Statuses of MAX_ONGOING streams held at once, the answer to one more request, and /health's status meanwhile."""
    async with httpx.AsyncClient(base_url=service.url, timeout=60.0) as client:
        done = asyncio.Event()

        async def hold() -> int:
            async with client.stream("POST", COMPLETIONS, json=LONG | {"stream": True}) as response:
                await done.wait()
                return response.status_code

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            held = [group.create_task(hold()) for _ in range(MAX_ONGOING)]
            await asyncio.to_thread(service.wait_until, lambda stats: stats.running + stats.waiting == MAX_ONGOING)
            more = await client.post(COMPLETIONS, json=LONG)
            health = await client.get("/health")
            done.set()
        return [task.result() for task in held], more, health.status_code


def test_more_requests_than_may_be_ongoing_are_503_and_probes_still_answer(service: Service):
    held, more, health = asyncio.run(_overload(service))
    assert held == [200] * MAX_ONGOING
    assert (more.status_code, more.headers["retry-after"]) == (503, "1")
    assert more.json()["error"]["code"] == "overloaded"
    assert health == 200
    service.wait_until_idle()


def test_requests_of_many_clients_at_once_get_their_own_answers(service: Service, engine: Engine):
    prompts = [f"{place} rivers" for place in range(MAX_ONGOING)]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = [result.text for result in engine.generate(prompts, params)]

    async def ask() -> list[str]:
        async with httpx.AsyncClient(base_url=service.url, timeout=60.0) as client:
            body = {"model": MODEL, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            answers = await asyncio.gather(
                *(client.post(COMPLETIONS, json=body | {"prompt": prompt}) for prompt in prompts)
            )
        return [answer.json()["choices"][0]["text"] for answer in answers]

    assert asyncio.run(ask()) == expected


def _driver_replica() -> ray.actor.ActorHandle:
    names = [
        entry["name"]
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["name"].startswith(f"SERVE_REPLICA::{APPLICATION}#Driver")
    ]
    assert len(names) == 1
    return ray.get_actor(names[0], namespace="serve")


def test_a_driver_that_dies_is_replaced_and_its_streams_go_on(service: Service, http: httpx.Client):
    with http.stream("POST", COMPLETIONS, json=LONG | {"stream": True}) as response:
        received = events(response.iter_lines())
        next(received)
        ray.kill(_driver_replica())
        *_, last, done = received
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"
    deadline = time.monotonic() + 90
    while (ready := http.get("/ready")).status_code != 200:
        assert ready.status_code == 503
        assert time.monotonic() < deadline, ready.text
    body = {"model": MODEL, "prompt": "The", "max_tokens": 4}
    assert http.post(COMPLETIONS, json=body).status_code == 200
