"""Replicas that are killed: no request fails, and every answer is that of an undisturbed run."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from faults.load import Load
from faults.victims import assert_gone, pids_of
from ray import serve
from support.service import MODEL, Service

from raysonar.observe.counters import EngineStats
from raysonar.serving.app import build_app

REQUESTS = 16
TOKENS = 160
NAME = "faults"


def deploy(folder: Path, max_waiting: int = 1000) -> None:
    scheduling = {"max_running": 12, "max_waiting": max_waiting}
    engine = {"model": str(folder), "scheduling": scheduling, "cache": {"pages": 400}}
    serve.run(build_app({"engine": engine}), name=NAME, route_prefix=f"/{NAME}")


@pytest.fixture(scope="module")
def load(service: Service, folder: Path) -> Iterator[Load]:
    """For an application beside the other tests' one."""
    deploy(folder)
    prompts = tuple(f"Story {number}:" for number in range(8))
    yield Load(f"{service.url}/{NAME}", MODEL, REQUESTS, TOKENS, prompts)
    serve.delete(NAME)


def driver_stats() -> EngineStats:
    stats: EngineStats = serve.get_deployment_handle("Driver", NAME).stats.remote().result(timeout_s=30)
    return stats


def assert_idle() -> None:
    deadline = time.monotonic() + 30
    while (stats := driver_stats()).running or stats.waiting or stats.pages_referenced:
        assert time.monotonic() < deadline, stats
    assert stats.pages_free == stats.pages


def test_requests_outlive_the_driver(load: Load) -> None:
    undisturbed = load.run()
    assert undisturbed.failures == []
    choices = REQUESTS // 4 * 5 * 2
    assert (
        undisturbed.tokens == sum(each.usage["completion_tokens"] for each in undisturbed.brought) == choices * TOKENS
    )
    [pid] = pids_of(f"ServeReplica:{NAME}:Driver")

    disturbed = load.run(lambda: os.kill(pid, signal.SIGKILL), after=REQUESTS * TOKENS // 8)
    assert_gone({pid})
    assert disturbed.failures == []
    assert disturbed.different(undisturbed) == 0
    assert_idle()


def test_requests_of_an_ingress_that_is_killed_stop_and_free_what_they_hold(load: Load) -> None:
    [pid] = pids_of(f"ServeReplica:{NAME}:Ingress")
    body = load.body(1, stream=True) | {"max_tokens": 480, "logprobs": 20}

    async def lose() -> None:
        async with httpx.AsyncClient(base_url=load.url, timeout=180) as client:
            streams = [asyncio.create_task(lost(client)) for _ in range(48)]
            while (await asyncio.to_thread(driver_stats)).waiting < 24:
                await asyncio.sleep(0.05)
            os.kill(pid, signal.SIGKILL)
            await asyncio.gather(*streams)

    async def lost(client: httpx.AsyncClient) -> None:
        """Read until the connection ends, before the answer does."""
        with contextlib.suppress(httpx.RemoteProtocolError):
            async with client.stream("POST", "/v1/completions", json=body) as response:
                assert "data: [DONE]" not in [line async for line in response.aiter_lines()]

    before = driver_stats()
    asyncio.run(lose())
    began = time.monotonic()
    assert_idle()
    assert time.monotonic() - began < 10
    assert driver_stats().aborted - before.aborted >= 12
    assert load.run().failures == []  # the ingress that took its place is not taken for the one that is gone


def test_streams_end_when_all_replicas_are_replaced(load: Load, folder: Path) -> None:
    """A rolling update: whoever was asked before answers to the end, new ones answer what comes after."""
    undisturbed = load.run()
    before = pids_of(f"ServeReplica:{NAME}:")
    with ThreadPoolExecutor(1) as pool:
        updates: list[Future[None]] = []
        disturbed = load.run(
            lambda: updates.append(pool.submit(deploy, folder, max_waiting=1001)), after=REQUESTS * TOKENS // 8
        )
        updates[0].result(timeout=120)
    assert disturbed.failures == []
    assert disturbed.different(undisturbed) == 0
    assert load.run().different(undisturbed) == 0
    assert_gone(before, timeout_s=30)
    assert len(pids_of(f"ServeReplica:{NAME}:")) == 2
