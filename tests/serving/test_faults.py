"""Replicas that are killed: no request fails, and every answer is that of an undisturbed run."""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from ray import serve
from support.service import MODEL, Service
from support.victims import assert_gone, pids_of

from raysonar.observe.counters import EngineStats
from raysonar.serving.app import build_app

REQUESTS = 16
TOKENS = 160
NAME = "faults"


@pytest.fixture(scope="module")
def victim(service: Service, folder: Path) -> Iterator[str]:
    """The URL of an application beside the other tests' one."""
    engine = {"model": str(folder), "scheduling": {"max_running": 12}, "cache": {"pages": 400}}
    serve.run(build_app({"engine": engine}), name=NAME, route_prefix=f"/{NAME}")
    yield f"{service.url}/{NAME}"
    serve.delete(NAME)


def body(place: int, *, stream: bool) -> dict[str, Any]:
    """Half of the requests are greedy, half seeded; some have two answers."""
    values: dict[str, Any] = {"model": MODEL, "prompt": f"Story {place % 8}:", "max_tokens": TOKENS, "logprobs": 0}
    values |= {"ignore_eos": True, "n": 1 + (place % 4 == 0), "frequency_penalty": 0.1}
    values |= {"temperature": 0} if place % 2 else {"temperature": 0.9, "seed": place}
    return values | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


class Answers:
    """What one request has brought: tokens, text and end of each choice, and the usage."""

    def __init__(self) -> None:
        self.choices: dict[int, dict[str, Any]] = {}
        self.usage: dict[str, int] = {}

    def take(self, data: dict[str, Any]) -> None:
        assert "error" not in data, data
        for choice in data["choices"]:
            mine = self.choices.setdefault(choice["index"], {"text": "", "tokens": [], "offsets": [], "end": None})
            mine["text"] += choice["text"]
            mine["tokens"] += choice["logprobs"]["tokens"] if choice["logprobs"] else []
            mine["offsets"] += choice["logprobs"]["text_offset"] if choice["logprobs"] else []
            mine["end"] = choice["finish_reason"]
        if data.get("usage"):
            self.usage = {name: data["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")}


Read = Callable[[httpx.AsyncClient, int, Callable[[], None]], Awaitable[Answers]]


async def read_stream(client: httpx.AsyncClient, place: int, heard: Callable[[], None]) -> Answers:
    answers = Answers()
    async with client.stream("POST", "/v1/completions", json=body(place, stream=True)) as response:
        assert response.status_code == 200
        lines = [line async for line in _heard(response.aiter_lines(), heard) if line]
    assert lines.pop() == "data: [DONE]"
    for line in lines:
        answers.take(json.loads(line.removeprefix("data: ")))
    return answers


async def _heard(lines: Any, heard: Callable[[], None]) -> Any:
    async for line in lines:
        heard()
        yield line


async def read_whole(client: httpx.AsyncClient, place: int, heard: Callable[[], None]) -> Answers:
    answers = Answers()
    response = await client.post("/v1/completions", json=body(place, stream=False))
    assert response.status_code == 200, response.text
    answers.take(response.json())
    return answers


def ask(url: str, blow: Callable[[], None] | None, after: int) -> list[dict[str, Any]]:
    """All requests at once, streamed and not; `blow` is struck once `after` lines have come."""
    lines, waiting = [0], [] if blow is None else [blow]

    def heard() -> None:
        lines[0] += 1
        if waiting and lines[0] > after:
            waiting.pop()()

    async def all_of_them() -> list[Answers]:
        limits = httpx.Limits(max_connections=2 * REQUESTS)
        async with httpx.AsyncClient(base_url=url, timeout=180, limits=limits) as client:
            reads = [read(client, place, heard) for read in (read_stream, read_whole) for place in range(REQUESTS)]
            return await asyncio.gather(*reads)

    answers = asyncio.run(all_of_them())
    assert not waiting, f"the blow was not struck: {lines[0]} lines"
    return [vars(each) for each in answers]


def assert_idle() -> None:
    deadline = time.monotonic() + 30
    while True:
        stats = _stats()
        if not (stats.running or stats.waiting or stats.pages_referenced):
            assert stats.pages_free == stats.pages
            return
        assert time.monotonic() < deadline, stats


def test_requests_outlive_the_driver(victim: str) -> None:
    undisturbed = ask(victim, None, 0)
    assert all(each["usage"]["completion_tokens"] == TOKENS * len(each["choices"]) for each in undisturbed)
    [pid] = pids_of(f"ServeReplica:{NAME}:Driver")

    disturbed = ask(victim, lambda: os.kill(pid, signal.SIGKILL), after=REQUESTS * 20)
    assert_gone({pid})
    assert disturbed == undisturbed
    assert_idle()


def test_requests_of_an_ingress_that_is_killed_stop_and_free_what_they_hold(victim: str) -> None:
    [pid] = pids_of(f"ServeReplica:{NAME}:Ingress")
    values = body(1, stream=True) | {"max_tokens": 480, "logprobs": 20, "n": 1}

    async def lose() -> float:
        async with httpx.AsyncClient(base_url=victim, timeout=180) as client:
            streams = [asyncio.create_task(_lost(client, values)) for _ in range(48)]
            while (await asyncio.to_thread(_stats)).waiting < 24:
                await asyncio.sleep(0.05)
            os.kill(pid, signal.SIGKILL)
            began = time.monotonic()
            await asyncio.gather(*streams)
            return began

    before = _stats()
    began = asyncio.run(lose())
    assert_idle()
    assert time.monotonic() - began < 30
    after = _stats()
    assert after.aborted - before.aborted >= 12
    assert ask(victim, None, 0)[1]["usage"]["completion_tokens"] == TOKENS  # the ingress that took its place is known


async def _lost(client: httpx.AsyncClient, values: dict[str, Any]) -> None:
    """Read until the connection ends, before the answer does."""
    with contextlib.suppress(httpx.RemoteProtocolError):
        async with client.stream("POST", "/v1/completions", json=values) as response:
            assert "data: [DONE]" not in [line async for line in response.aiter_lines()]


def _stats() -> EngineStats:
    stats: EngineStats = serve.get_deployment_handle("Driver", NAME).stats.remote().result(timeout_s=30)
    return stats
