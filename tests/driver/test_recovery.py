"""Ranks that fail are started again: texts are those of an undisturbed run, and what cannot be mended ends."""

import asyncio
import logging
import threading
from contextlib import aclosing

import pytest

from raysonar.config import RecoveryConfig
from raysonar.driver import recovery as recovery_module
from raysonar.driver.params import SamplingParams
from raysonar.driver.recovery import Recovery
from raysonar.errors import EngineFailedError, RankLostError, RequestFailedError
from tests.support.fake_rank import FakeChannel, FakeRank, rank_info

PROMPTS = [[n, n + 1, n + 2] for n in range(5, 17)]
POISON = 300


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch):
    monkeypatch.setattr(recovery_module, "_FIRST_PAUSE_S", 0.001)


def params(**values) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 40, "ignore_eos": True, **values})


class Failures:
    """Fails steps by the order in which ranks take them up."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.taken = set(steps), 0

    def __call__(self, plan):
        self.taken += 1
        if self.taken - 1 in self.steps:
            raise MemoryError(f"the device is on fire, {self.taken}")


def assert_nothing_is_held(engine):
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_referenced, stats.steps_in_flight) == (0, 0, 0, 0)
    assert stats.pages_free == stats.pages


@pytest.mark.parametrize("steps", [(0,), (1,), (7,), (3, 4), (5, 9, 20)])
@pytest.mark.parametrize(("k", "plans_in_flight"), [(0, 1), (1, 2), (3, 3)])
def test_streams_go_on_with_nothing_lost_or_repeated(start_engine, model, tokenizer, k, plans_in_flight, steps):
    engine = start_engine(k=k, plans_in_flight=plans_in_flight, restarts=9, before=Failures(*steps), slots=5, pages=64)
    ids: dict[int, list[int]] = {place: [] for place in range(len(PROMPTS))}
    texts, logprobs = dict.fromkeys(ids, ""), {place: [] for place in ids}
    for place, delta in engine.generate_stream(PROMPTS, params(logprobs=1)):
        ids[place] += delta.token_ids
        texts[place] += delta.text
        logprobs[place] += delta.logprobs
    for place, prompt in enumerate(PROMPTS):
        expected = model.continuation(prompt, 40)
        assert ids[place] == [entry.token_id for entry in logprobs[place]] == expected
        assert texts[place] == tokenizer.decode(expected)
    assert engine.stats().recoveries == start_engine.channel.restarts == len(steps)
    assert engine.stats().requests == len(PROMPTS)
    assert_nothing_is_held(engine)


def test_several_answers_prompt_logprobs_and_usage_survive(start_engine, model):
    asked = params(n=3, prompt_logprobs=0, min_tokens=3)
    prompts = [list(range(5, 60)), PROMPTS[0]]
    undisturbed = start_engine(token_budget=16).generate(prompts, asked)
    engine = start_engine(token_budget=16, restarts=9, before=Failures(2, 4, 30))
    for mine, theirs in zip(engine.generate(prompts, asked), undisturbed, strict=True):
        assert mine.prompt_logprobs == theirs.prompt_logprobs
        assert [each.token_ids for each in mine.completions] == [each.token_ids for each in theirs.completions]
    assert engine.stats().recoveries == 3
    assert engine.stats().generated_tokens == 2 * 3 * 40
    assert_nothing_is_held(engine)


def test_the_prefix_cache_forgets_what_the_ranks_have_lost(start_engine, model):
    """The rank checks every cache entry that it reads."""
    failures = Failures()
    engine = start_engine(restarts=2, before=failures)
    engine.generate([list(range(5, 60))], params())
    failures.steps.add(failures.taken)
    assert engine.stats().pages_cached > 0
    (result,) = engine.generate([list(range(5, 60))], params())
    assert result.token_ids == model.continuation(list(range(5, 60)), 40)
    assert engine.stats().recoveries == 1


def test_a_cause_is_logged_once_a_failure(start_engine, caplog):
    engine = start_engine(restarts=9, before=Failures(3, 8))
    with caplog.at_level(logging.WARNING):
        engine.generate(PROMPTS, params())
    failed, up, failed_again, up_again = caplog.records
    assert [record.exc_info and record.exc_info[0] for record in caplog.records] == [MemoryError, None] * 2
    assert "(MemoryError: the device is on fire, 4)" in failed.message
    assert "1 of 9 times" in failed.message
    assert "2 of 9 times" in failed_again.message
    assert all("up again" in record.message for record in (up, up_again))


def test_a_rank_that_is_gone_is_named_without_the_trace_of_how_that_was_noticed(caplog: pytest.LogCaptureFixture):
    info = rank_info()
    channel = FakeChannel(FakeRank(info=info, token_budget=8))
    Recovery(channel, info, RecoveryConfig()).restart(RankLostError("rank 1 is gone: it closed"), lambda _: False)
    failed, up = caplog.records
    assert "(RankLostError: rank 1 is gone: it closed)" in failed.message
    assert not failed.exc_info
    assert "up again" in up.message


def test_a_crash_loop_ends_the_engine_with_its_cause_and_without_a_flood(start_engine, caplog):
    engine = start_engine(restarts=3, before=Failures(*range(1000)))
    with caplog.at_level(logging.WARNING), pytest.raises(EngineFailedError, match="on fire") as failed:
        engine.generate(PROMPTS, params())
    assert isinstance(failed.value.__cause__, MemoryError)
    assert start_engine.channel.restarts == 3
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 6 + ["ERROR"]
    with pytest.raises(EngineFailedError, match="on fire"):
        engine.check_health()


def test_failures_long_ago_do_not_count(start_engine, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(recovery_module.time, "monotonic", lambda: now[0])
    failures = Failures(0)
    engine = start_engine(restarts=1, before=failures)
    for _ in range(4):
        now[0] += 601.0
        engine.generate(PROMPTS[:1], params())
        failures.steps.add(failures.taken + 1)
    assert engine.stats().recoveries == 4


def test_pauses_between_restarts_grow(start_engine, monkeypatch):
    monkeypatch.setattr(recovery_module, "_FIRST_PAUSE_S", 1.0)
    pauses = []
    engine = start_engine(restarts=9, before=Failures(0, 1, 2, 3))
    monkeypatch.setattr(engine._loop, "_closed_within", pauses.append)
    engine.generate(PROMPTS[:1], params())
    assert pauses == [0.0, 1.0, 2.0, 4.0]


def test_a_restart_that_fails_is_tried_again(start_engine, model):
    engine = start_engine(restarts=4, before=Failures(5))
    errors = [OSError("no place"), OSError("no place"), None]
    start_engine.channel.restart_error = lambda: errors.pop(0)
    results = engine.generate(PROMPTS, params())
    assert [result.token_ids for result in results] == [model.continuation(prompt, 40) for prompt in PROMPTS]
    assert (start_engine.channel.restarts, engine.stats().recoveries) == (3, 1)


def test_ranks_that_come_back_otherwise_end_the_engine(start_engine):
    engine = start_engine(restarts=1, before=Failures(5))
    start_engine.channel.restart = lambda: recovery_module.replace(engine.info, pages=7)
    with pytest.raises(EngineFailedError, match="not what they were"):
        engine.generate(PROMPTS, params())


def poison(plan):
    """A step that computes a token of this kind."""
    if POISON in plan.admitted_tokens.tolist():
        poisoned.update(plan.admitted_slot.tolist())
    else:
        poisoned.difference_update(plan.admitted_slot.tolist())
    if poisoned & set(plan.row_slot.tolist()):
        raise ValueError("an index is out of bounds")


poisoned: set[int] = set()


@pytest.mark.parametrize("plans_in_flight", [1, 3])
@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_request_that_makes_every_step_fail_is_found_and_fails_alone(start_engine, model, place, plans_in_flight):
    poisoned.clear()
    engine = start_engine(restarts=3, before=poison, plans_in_flight=plans_in_flight, slots=16)
    prompts = [*PROMPTS[:place], [5, POISON, 6], *PROMPTS[place:]]

    async def outcome(prompt):
        async with aclosing(engine.stream(prompt, params(n=2))) as stream:
            deltas = [delta async for delta in stream]
        return [[token for delta in deltas if delta.index == i for token in delta.token_ids] for i in range(2)]

    async def all_of_them():
        return await asyncio.gather(*map(outcome, prompts), return_exceptions=True)

    results = asyncio.run(asyncio.wait_for(all_of_them(), 60))
    for prompt, result in zip(prompts, results, strict=True):
        if POISON in prompt:
            assert isinstance(result, RequestFailedError)
            assert "out of bounds" in str(result)
        else:
            assert result == [model.continuation(prompt, 40)] * 2
    assert engine.stats().recoveries == 3
    assert_nothing_is_held(engine)


def test_requests_come_and_go_while_suspects_run_alone(start_engine, model):
    poisoned.clear()
    engine = start_engine(restarts=3, slots=16)
    late, aborted = threading.Event(), threading.Event()

    def before(plan):
        if start_engine.channel.restarts == 2 and not late.is_set():
            late.set()
            aborted.wait(30)
        poison(plan)

    start_engine.channel.before = before

    async def ids(prompt):
        async with aclosing(engine.stream(prompt, params())) as stream:
            return [token async for delta in stream for token in delta.token_ids]

    async def run():
        streams = [asyncio.create_task(ids(prompt)) for prompt in PROMPTS]
        culprit = asyncio.create_task(ids([POISON]))
        given_up = engine.stream([9, 9], params(), request_id="given up")
        reader = asyncio.create_task(anext(given_up))
        await asyncio.to_thread(late.wait, 30)
        newcomer = asyncio.create_task(ids([8, 8]))
        while engine.stats().requests < len(PROMPTS) + 3:
            await asyncio.sleep(0)
        assert engine.abort("given up")
        aborted.set()
        results = await asyncio.gather(*streams, newcomer)
        with pytest.raises(RequestFailedError):
            await culprit
        await reader
        await given_up.aclose()
        return results

    expected = [model.continuation(prompt, 40) for prompt in [*PROMPTS, [8, 8]]]
    assert asyncio.run(asyncio.wait_for(run(), 60)) == expected
    assert_nothing_is_held(engine)


def test_failures_that_are_nobodys_fault_blame_nobody(start_engine, model):
    """Again and again, but requests come further in between."""
    engine = start_engine(restarts=9, k=1, before=Failures(20, 45, 70, 95), slots=4)
    prompts = PROMPTS[:4]
    results = engine.generate(prompts, params(max_tokens=120))
    assert [result.token_ids for result in results] == [model.continuation(prompt, 120) for prompt in prompts]


def test_requests_are_taken_and_let_go_while_ranks_restart(start_engine, model):
    begun, go_on = threading.Event(), threading.Event()
    engine = start_engine(restarts=1, before=Failures(5))

    def restart():
        begun.set()
        assert go_on.wait(30)

    start_engine.channel.restart_error = restart

    async def run():
        first = asyncio.create_task(asyncio.to_thread(engine.generate, PROMPTS, params()))
        dropped = engine.stream([9, 9], params())
        reader = asyncio.create_task(anext(dropped))
        await asyncio.to_thread(begun.wait, 30)
        engine.check_health(0.0)
        late = asyncio.create_task(asyncio.to_thread(engine.generate, [[8, 8]], params()))
        while engine.stats().requests < len(PROMPTS) + 2:
            await asyncio.sleep(0)
        reader.cancel()
        go_on.set()
        return [result.token_ids for result in (*await first, *await late)]

    expected = [model.continuation(prompt, 40) for prompt in [*PROMPTS, [8, 8]]]
    assert asyncio.run(asyncio.wait_for(run(), 60)) == expected
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("pause", [0.0, 1000.0])
def test_closing_ends_a_restart(start_engine, monkeypatch, pause):
    monkeypatch.setattr(recovery_module, "_FIRST_PAUSE_S", pause)
    begun, closed = threading.Event(), threading.Event()
    engine = start_engine(restarts=9, before=Failures(5))
    channel = start_engine.channel
    close = channel.close

    def fail():
        begun.set()
        assert pause or closed.wait(30)
        return OSError("no place")

    channel.restart_error = fail
    channel.close = lambda: (closed.set(), close())

    async def run():
        reader = asyncio.create_task(asyncio.to_thread(engine.generate, PROMPTS, params()))
        await asyncio.to_thread(begun.wait, 30)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineFailedError, match="the engine was closed"):
            await reader

    asyncio.run(asyncio.wait_for(run(), 30))


def test_a_rank_that_fails_while_there_is_nothing_to_do_is_started_again(start_engine, model):
    engine = start_engine(restarts=1)
    engine.generate(PROMPTS, params())
    restarted = threading.Event()
    start_engine.channel.restart_error = restarted.set
    start_engine.channel.idle_error = EngineFailedError("rank 1 is gone")
    assert restarted.wait(30)
    assert engine.generate([[5]], params())[0].token_ids == model.continuation([5], 40)


def test_a_trace_that_ranks_failed_under_says_so(start_engine, tmp_path):
    engine = start_engine(restarts=1, before=Failures(5))
    with (
        pytest.raises(EngineFailedError, match="failed under the trace"),
        engine.trace(tmp_path / "trace.json"),
    ):
        engine.generate(PROMPTS, params())
    with engine.trace(tmp_path / "trace.json"):
        engine.generate(PROMPTS, params())


def test_an_answer_that_cannot_be_given_out_fails_alone(start_engine, model, monkeypatch):
    engine = start_engine(restarts=0)
    give_out = engine._loop._open._give_out

    def fail(advance, logprobs):
        if advance.answer.request.prompt_token_ids == PROMPTS[3]:
            raise KeyError("a token without a text")
        give_out(advance, logprobs)

    monkeypatch.setattr(engine._loop._open, "_give_out", fail)
    with pytest.raises(RequestFailedError, match="a token without a text"):
        engine.generate(PROMPTS[3:5], params())
    assert engine.generate([PROMPTS[5]], params())[0].token_ids == model.continuation(PROMPTS[5], 40)
    assert_nothing_is_held(engine)


def test_a_start_that_the_close_of_the_engine_ends_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    info, closing = rank_info(), []
    channel = FakeChannel(FakeRank(info=info, token_budget=8))

    def end() -> Exception:
        closing.append(True)
        return EngineFailedError("the group was ended while it was being started")

    channel.restart_error = end
    Recovery(channel, info, RecoveryConfig(restarts=1)).restart(EngineFailedError("lost"), lambda _: bool(closing))
    assert channel.restarts == 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
