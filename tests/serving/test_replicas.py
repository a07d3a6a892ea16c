"""Two replicas of the demo model: prompts go where their beginnings are computed, and the load stays even."""

import asyncio
import random
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from ray import serve
from support.service import Service

from raysonar.observe.counters import EngineStats
from raysonar.serving import app

GROUPS, REQUESTS = 6, 5
"""Beginnings, and prompts that have each of them."""
SLOTS = 8
ENGINE = {"dtype": "float32", "scheduling": {"max_running": SLOTS}, "speculation": {"tokens": 1}}
Start = Callable[[str], str]


@pytest.fixture
def start(service: Service) -> Iterator[Start]:
    """Serve two replicas of the demo model under a name; returns the URL."""
    names: list[str] = []

    def begin(name: str) -> str:
        names.append(name)
        serve.run(app.build_app({"engine": ENGINE, "replicas": 2}), name=name, route_prefix=f"/{name}")
        return f"{service.url}/{name}"

    yield begin
    for name in names:
        serve.delete(name)


def prompts() -> list[str]:
    """In a random order; what they have in common is longer than what they have not."""
    draw = random.Random(7)
    countries = ["France", "Norway", "Peru", "Chad", "Japan", "Kenya", "Italy", "Cuba"]
    beginnings = [" ".join(draw.choices(countries, k=45)) for _ in range(GROUPS)]
    made = [f"{text}. Question {place}:" for text in beginnings for place in range(REQUESTS)]
    draw.shuffle(made)
    return made


def body(prompt: str, tokens: int) -> dict[str, Any]:
    return {"model": app.DEMO_NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


def cached(url: str) -> list[int]:
    """Tokens of each prompt that were found in a cache; one request after the other."""
    with httpx.Client(base_url=url, timeout=120) as client:
        answers = [client.post("/v1/completions", json=body(prompt, 2)).json() for prompt in prompts()]
    return [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]


def stats(name: str) -> list[EngineStats]:
    """Of each replica."""
    return serve.get_deployment_handle("Driver", name).broadcast("stats").results(timeout_s=30)


def test_more_is_found_in_the_caches_than_with_serves_own_router(start: Start, monkeypatch: pytest.MonkeyPatch):
    routed = cached(start("routed"))
    by_replica = stats("routed")
    monkeypatch.setattr(app, "_routing", lambda config: {})
    default = cached(start("default"))
    # the first prompt with each beginning fills a cache, all others find it
    assert sum(tokens > 32 for tokens in routed) == GROUPS * (REQUESTS - 1)
    assert sum(tokens > 32 for tokens in default) < GROUPS * (REQUESTS - 1)
    assert sum(routed) > 1.1 * sum(default)
    # and the beginnings are spread over the replicas, though none ever had more to do than the other
    counts = sorted(each.requests for each in by_replica)
    assert counts[0] >= REQUESTS * (GROUPS // 2)
    print(f"found: {sum(routed)} tokens, by default {sum(default)}; requests {counts}")


def test_the_load_is_even_where_all_prompts_begin_alike(start: Start):
    url = start("alike")
    beginning = prompts()[0]

    async def ask_all() -> list[int]:
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=64)) as client:
            bodies = [body(f"{beginning} {place}", 300) for place in range(32)]  # all of them at once
            answers = await asyncio.gather(*(client.post("/v1/completions", json=each) for each in bodies))
        return [answer.status_code for answer in answers]

    warm_up = sum(each.requests for each in stats("alike"))
    assert set(asyncio.run(ask_all())) == {200}
    counts = [each.requests for each in stats("alike")]
    assert sum(counts) == 32 + warm_up
    assert max(counts) - min(counts) <= SLOTS // 2, counts
