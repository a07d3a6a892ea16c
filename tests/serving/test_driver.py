"""The driver deployment's class around a real engine, without Ray."""

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from raysonar import Engine, SamplingParams
from raysonar.config import EngineConfig
from raysonar.driver.outputs import Delta
from raysonar.errors import EngineFailedError, ModelFolderError
from raysonar.serving import driver as driver_module
from raysonar.serving.driver import Driver
from raysonar.serving.feed import Feed
from raysonar.serving.generation import Batch, Chat, Generation, Reader
from raysonar.serving.problems import Problem

LONG = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)


@pytest.fixture(scope="module")
def driver(folder: Path) -> Iterator[Driver]:
    driver = Driver(EngineConfig(model=folder, threads=1), start_timeout_s=120, model="tiny")
    yield driver
    driver.__del__()


async def collect(batches: AsyncGenerator[Batch]) -> tuple[list[tuple[int, Delta]], list[Problem]]:
    deltas: list[tuple[int, Delta]] = []
    problems: list[Problem] = []
    async with asyncio.timeout(60), aclosing(batches):
        async for batch in batches:
            if isinstance(batch, Problem):
                problems.append(batch)
            else:
                deltas += batch
    return deltas, problems


def assert_idle(driver: Driver) -> None:
    stats = driver.stats()
    assert (stats.running, stats.waiting, stats.pages_referenced) == (0, 0, 0)


def test_a_driver_that_is_up_has_generated_tokens(driver: Driver):
    assert driver.stats().generated_tokens >= 4


async def nothing_comes(batches: AsyncGenerator[Batch]) -> None:
    async with aclosing(batches):
        assert [batch async for batch in batches] == []


def test_what_goes_to_a_reader_is_what_would_come_from_the_stream(driver: Driver):
    async def fed() -> list[Batch]:
        ingress = Feed("127.0.0.1", print)
        generation = Generation("r", ["hi", "there"], SHORT, reader=await ingress.reader())
        stream = ingress.opened("r", driver.stream(generation))
        return [batch async for batch in stream]

    deltas, _ = asyncio.run(collect(driver.stream(Generation("r", ["hi", "there"], SHORT))))
    first, *batches = asyncio.run(asyncio.wait_for(fed(), 60))
    assert first == []
    news = [delta for batch in batches if isinstance(batch, list) for delta in batch]
    for place in (0, 1):
        texts = ["".join(delta.text for at, delta in each if at == place) for each in (news, deltas)]
        assert texts[0] == texts[1]


@pytest.mark.parametrize("prompts", [["hi"], ["hi", "there"]])
def test_a_reader_that_goes_away_frees_slots_and_pages_at_once(driver: Driver, prompts: list[Any]):
    async def leave() -> None:
        server = await asyncio.start_server(take_some, "127.0.0.1", 0)
        reader = Reader("127.0.0.1", server.sockets[0].getsockname()[1], bytes(16))
        await nothing_comes(driver.stream(Generation("r", prompts, LONG, reader=reader)))

    async def take_some(source: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await source.readexactly(1000)
        assert driver.stats().running == len(prompts)
        writer.close()

    before = driver.stats().generated_tokens
    asyncio.run(asyncio.wait_for(leave(), 60))
    assert driver.stats().generated_tokens - before < 400 * len(prompts)
    assert_idle(driver)


def test_what_the_ingress_is_told_of_the_engine_needs_no_torch_there(driver: Driver):
    """It would take a second, and 180 MB."""
    asyncio.run(collect(driver.stream(Generation("r", ["hi"], SHORT))))
    told = cloudpickle.dumps((driver.report(), driver.stats(), driver.steps(5), driver.profile(), driver.vocabulary()))
    code = "import pickle, sys; pickle.load(sys.stdin.buffer); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], input=told, check=True, timeout=60)


def test_what_comes_for_a_reader_that_is_gone_is_not_begun(driver: Driver):
    """As that which was on its way when an ingress was killed."""

    async def work() -> list[Batch]:
        server = await asyncio.start_server(lambda source, writer: writer.close(), "127.0.0.1", 0)
        reader = Reader("127.0.0.1", server.sockets[0].getsockname()[1], bytes(16))
        await nothing_comes(driver.stream(Generation("r1", ["hi"], LONG, reader=reader)))
        server.close()
        await server.wait_closed()
        return [batch async for batch in driver.stream(Generation("r2", ["hi"], LONG, reader=reader))]

    before = driver.stats().generated_tokens
    [problem] = asyncio.run(asyncio.wait_for(work(), 60))
    assert isinstance(problem, Problem)
    assert problem.code == "engine_unavailable"
    assert driver.stats().generated_tokens - before < 400
    assert_idle(driver)


def test_a_reader_that_is_not_there_is_answered_by_the_stream_itself(driver: Driver):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        reader = Reader("127.0.0.1", taken.getsockname()[1], bytes(16))
        deltas, problems = asyncio.run(collect(driver.stream(Generation("r", ["hi"], SHORT, reader=reader))))
    assert problems == []
    assert sum(len(delta.token_ids) for _, delta in deltas) == 10


def test_streams_of_texts_tokens_and_chats_equal_the_engines(driver: Driver, engine: Engine):
    messages = ({"role": "user", "content": "hi"},)
    prompts = ["hi", engine.tokenizer.encode("there"), Chat(messages)]
    expected = engine.generate(["hi", prompts[1], engine.tokenizer.render_chat(messages)], SHORT)
    deltas, problems = asyncio.run(collect(driver.stream(Generation("r", prompts, SHORT))))
    assert problems == []
    for place, result in enumerate(expected):
        assert "".join(delta.text for at, delta in deltas if at == place) == result.text
        assert [token for at, delta in deltas if at == place for token in delta.token_ids] == result.token_ids
    assert_idle(driver)


def test_the_first_batch_says_that_the_request_has_arrived(driver: Driver):
    async def first() -> Batch:
        async with aclosing(driver.stream(Generation("r", ["hi"], LONG))) as batches:
            return await anext(batches)

    assert asyncio.run(first()) == []
    assert_idle(driver)


@pytest.mark.parametrize("batches_taken", [1, 2, 5])
def test_closing_a_stream_frees_slots_and_pages_at_once(driver: Driver, batches_taken: int):
    async def leave() -> None:
        async with asyncio.timeout(60), aclosing(driver.stream(Generation("r", ["hi", "there"], LONG))) as batches:
            for _ in range(batches_taken):
                await anext(batches)

    before = driver.stats()
    asyncio.run(leave())
    assert_idle(driver)
    assert driver.stats().generated_tokens - before.generated_tokens < 2 * 400


def test_cancelling_the_reader_frees_slots_and_pages_at_once(driver: Driver):
    async def cancel() -> None:
        reader = asyncio.create_task(collect(driver.stream(Generation("r", ["hi", "there"], LONG))))
        while driver.stats().running < 2:
            await asyncio.sleep(0.001)  # not 0: a loop that only polls keeps the engine's thread from running
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        assert_idle(driver)

    asyncio.run(cancel())


def test_streams_at_once_share_a_rate_of_batches_and_lose_nothing(driver: Driver, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(driver_module, "_BATCHES_PER_S", 8.0)
    monkeypatch.setattr(driver_module, "_LONGEST_PAUSE_S", 0.5)
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)

    async def one(number: int) -> tuple[int, int]:
        deltas = [batch async for batch in driver.stream(Generation(f"r{number}", ["hi"], params)) if batch]
        return len(deltas), sum(len(delta.token_ids) for batch in deltas for _, delta in batch)

    async def many() -> list[tuple[int, int]]:
        async with asyncio.timeout(60):
            return await asyncio.gather(*(one(number) for number in range(4)))

    began = time.monotonic()
    results = asyncio.run(many())
    seconds = time.monotonic() - began
    assert [tokens for _, tokens in results] == [64] * 4
    assert sum(batches for batches, _ in results) <= 8.0 * seconds + 4


def test_a_whole_answer_comes_in_one_batch(driver: Driver, engine: Engine):
    async def batches() -> list[Batch]:
        async with asyncio.timeout(60):
            return [batch async for batch in driver.stream(Generation("r", ["hi", "there"], SHORT, whole=True))]

    arrived, deltas = asyncio.run(batches())
    assert arrived == []
    assert not isinstance(deltas, Problem)
    expected = engine.generate(["hi", "there"], SHORT)
    for place, result in enumerate(expected):
        assert "".join(delta.text for at, delta in deltas if at == place) == result.text


def test_a_refused_prompt_is_a_problem_and_ends_the_others(driver: Driver):
    deltas, problems = asyncio.run(collect(driver.stream(Generation("r", ["hi", [10**6]], LONG))))
    assert [(problem.status, problem.param) for problem in problems] == [(400, "prompt")]
    assert all(place == 0 for place, _ in deltas)
    assert_idle(driver)


def test_the_vocabulary_is_the_tokenizers(driver: Driver, engine: Engine):
    vocabulary = driver.vocabulary()
    assert len(vocabulary.tokens) == engine.info.vocab
    tokens = engine.tokenizer.encode("Grüße aus Köln, 東京 🙂", add_special_tokens=False)
    assert vocabulary.decode(tokens) == "Grüße aus Köln, 東京 🙂"


def test_a_driver_whose_engine_has_ended_is_not_healthy_and_refuses(folder: Path):
    driver = Driver(EngineConfig(model=folder, threads=1), start_timeout_s=120, model="tiny")
    asyncio.run(driver.check_health())
    driver.__del__()
    with pytest.raises(EngineFailedError):
        asyncio.run(driver.check_health())
    _, problems = asyncio.run(collect(driver.stream(Generation("r", ["hi"], SHORT))))
    assert [(problem.status, problem.code) for problem in problems] == [(503, "engine_unavailable")]


def test_a_model_that_cannot_be_loaded_fails_the_start(tmp_path: Path):
    with pytest.raises(ModelFolderError, match=r"config\.json"):
        Driver(EngineConfig(model=tmp_path), start_timeout_s=60, model="tiny")


def test_a_start_that_takes_too_long_fails(folder: Path):
    with pytest.raises(TimeoutError):
        Driver(EngineConfig(model=folder, threads=1), start_timeout_s=1e-6, model="tiny")
