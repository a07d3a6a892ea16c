"""Replicas that are killed: no request fails, and every answer is that of an undisturbed run."""

import asyncio
import contextlib
import os
import signal
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from faults.load import Load, Outcome
from faults.victims import assert_gone, pids_of
from ray import serve
from support.service import MODEL, Deploy, Service

from raysonar.serving.app import build_app

REQUESTS = 16
TOKENS = 160
NAME = "faults"


def application(folder: Path, max_waiting: int = 1000) -> serve.Application:
    scheduling = {"max_running": 12, "max_waiting": max_waiting}
    engine = {"model": str(folder), "scheduling": scheduling, "cache": {"pages": 400}}
    return build_app({"engine": engine})


@pytest.fixture(scope="module")
def struck(deploy: Deploy, folder: Path) -> Service:
    """The service whose replicas are killed."""
    return deploy(NAME, application(folder))


@pytest.fixture(scope="module")
def load(struck: Service) -> Load:
    prompts = tuple(f"Story {number}:" for number in range(8))
    return Load(struck.url, MODEL, REQUESTS, TOKENS, prompts)


@pytest.fixture(scope="module")
def undisturbed(load: Load) -> Outcome:
    """What the load brings when nothing breaks."""
    outcome = load.run()
    assert outcome.failures == []
    return outcome


def test_requests_outlive_the_driver(struck: Service, load: Load, undisturbed: Outcome) -> None:
    choices = REQUESTS // 4 * 5 * 2
    assert (
        undisturbed.tokens == sum(each.usage["completion_tokens"] for each in undisturbed.brought) == choices * TOKENS
    )
    [pid] = pids_of(f"ServeReplica:{NAME}:Driver")

    disturbed = load.run(lambda: os.kill(pid, signal.SIGKILL), after=REQUESTS * TOKENS // 8)
    assert_gone({pid})
    assert disturbed.failures == []
    assert disturbed.different(undisturbed) == 0
    struck.wait_until_idle()


def test_requests_of_an_ingress_that_is_killed_stop_and_free_what_they_hold(struck: Service, load: Load) -> None:
    [pid] = pids_of(f"ServeReplica:{NAME}:Ingress")
    body = load.body(1, stream=True) | {"max_tokens": 480, "logprobs": 20}

    async def lose() -> None:
        async with httpx.AsyncClient(base_url=load.url, timeout=180) as client:
            streams = [asyncio.create_task(lost(client)) for _ in range(48)]
            while (await asyncio.to_thread(struck.stats)).waiting < 24:
                await asyncio.sleep(0.05)
            os.kill(pid, signal.SIGKILL)
            await asyncio.gather(*streams)

    async def lost(client: httpx.AsyncClient) -> None:
        """Read until the connection ends, before the answer does."""
        with contextlib.suppress(httpx.RemoteProtocolError):
            async with client.stream("POST", "/v1/completions", json=body) as response:
                assert "data: [DONE]" not in [line async for line in response.aiter_lines()]

    before = struck.stats()
    asyncio.run(lose())
    began = time.monotonic()
    struck.wait_until_idle()
    assert time.monotonic() - began < 10
    assert struck.stats().aborted - before.aborted >= 12
    assert load.run().failures == []  # the ingress that took its place is not taken for the one that is gone


def test_streams_end_when_all_replicas_are_replaced(
    deploy: Deploy, load: Load, undisturbed: Outcome, folder: Path
) -> None:
    """A rolling update: whoever was asked before answers to the end, new ones answer what comes after."""
    before = pids_of(f"ServeReplica:{NAME}:")
    with ThreadPoolExecutor(1) as pool:
        updates: list[Future[Service]] = []
        update = application(folder, max_waiting=1001)
        disturbed = load.run(lambda: updates.append(pool.submit(deploy, NAME, update)), after=REQUESTS * TOKENS // 8)
        updates[0].result(timeout=120)
    assert disturbed.failures == []
    assert disturbed.different(undisturbed) == 0
    assert load.run().different(undisturbed) == 0
    assert_gone(before, timeout_s=30)
    assert len(pids_of(f"ServeReplica:{NAME}:")) == 2
