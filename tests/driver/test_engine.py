"""The engine over a rank that says what a hash of the text says: answers, streams, ends, failures."""

import asyncio
import gc
import logging
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from threading import Event

import pytest
from support.fake_rank import HashModel

from raysonar.driver.engine import Engine
from raysonar.driver.outputs import TokenLogprob
from raysonar.driver.params import SamplingParams
from raysonar.errors import (
    ConfigurationError,
    EngineFailedError,
    InvalidRequestError,
    QueueFullError,
    TraceInProgressError,
)
from raysonar.model.tokenizer import Tokenizer

PROMPT = "What is the capital of Peru?"
FREE = {"ignore_eos": True}


def params(**values) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 24, **values})


def assert_nothing_is_held(engine):
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.pages_referenced) == (0, 0, 0)
    assert stats.pages_free == stats.pages


@pytest.mark.parametrize("plans_in_flight", [1, 2])
@pytest.mark.parametrize("k", range(5))
def test_texts_and_token_ids_get_the_models_answers(start_engine, tokenizer, model, k, plans_in_flight):
    engine = start_engine(k=k, plans_in_flight=plans_in_flight)
    prompts = [PROMPT, [5, 6, 7], "Name three rivers"]
    results = engine.generate(prompts, params(**FREE))
    for prompt, result in zip(prompts, results, strict=True):
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        expected = model.continuation(ids, 24)
        assert result.prompt_token_ids == ids
        assert result.prompt == (prompt if isinstance(prompt, str) else None)
        assert result.token_ids == expected
        assert result.text == tokenizer.decode(expected)
        assert result.finish_reason == "length"
        assert len(result.acceptance.drafted) == k
        assert 0 < result.first_token_seconds <= result.seconds
    assert_nothing_is_held(engine)


def test_one_prompt_may_come_without_a_list_and_params_one_for_each(start_engine):
    engine = start_engine()
    assert len(engine.generate(PROMPT, params())) == len(engine.generate([5, 6], params())) == 1
    assert engine.generate([]) == []
    assert [len(r.token_ids) for r in engine.generate([[5], [6]], [params(max_tokens=2), params(max_tokens=3)])] == [
        2,
        3,
    ]
    with pytest.raises(InvalidRequestError, match="2 prompts came with 1 params"):
        engine.generate([[5], [6]], [params()])


@pytest.mark.parametrize("k", [0, 4])
def test_end_of_sequence_ends_an_answer_and_has_no_text(start_engine, tokenizer, k):
    model = HashModel(384)
    engine = start_engine(k=k, model=model)
    prompt = next([n] for n in range(4, 384) if 1 in model.continuation([n], 24)[3:])
    expected = model.continuation(prompt, 24)
    end = expected.index(1)
    (result,) = engine.generate(prompt, params(logprobs=0))
    assert engine.stats().generated_tokens == end + 1
    assert result.token_ids == expected[: end + 1]
    assert result.text == tokenizer.decode(expected[:end])
    assert (result.finish_reason, result.completions[0].stop_reason) == ("stop", None)
    assert len(result.logprobs) == end + 1
    (free,) = engine.generate(prompt, params(**FREE))
    assert free.token_ids == expected
    assert free.text == tokenizer.decode(expected)
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("include", [False, True])
def test_stop_tokens_end_an_answer(start_engine, tokenizer, model, include):
    engine = start_engine(k=4)
    expected = model.continuation([9, 8], 24)
    stop = expected[10]
    end = expected.index(stop)
    (result,) = engine.generate(
        [9, 8], params(stop_token_ids=[stop], include_stop_str_in_output=include, logprobs=1, **FREE)
    )
    assert result.token_ids == expected[: end + 1]
    assert result.text == tokenizer.decode(expected[: end + include])
    assert (result.finish_reason, result.completions[0].stop_reason) == ("stop", stop)
    assert len(result.logprobs) == end + 1


@pytest.mark.parametrize("k", [0, 4])
@pytest.mark.parametrize("include", [False, True])
def test_nothing_leaks_past_a_stop_string(start_engine, tokenizer, model, k, include):
    engine = start_engine(k=k)
    prompt = [9, 8, 7]
    expected = model.continuation(prompt, 40)
    stop = tokenizer.decode(expected[20:24])[1:]
    text = tokenizer.decode(expected)
    end = text.index(stop)
    tokens = next(n for n in range(41) if stop in tokenizer.decode(expected[:n]))
    deltas = [
        delta
        for _, delta in engine.generate_stream(
            prompt,
            params(stop=["never said", stop], include_stop_str_in_output=include, logprobs=0, max_tokens=40, **FREE),
        )
    ]
    assert "".join(delta.text for delta in deltas) == text[: end + len(stop) * include]
    assert [token for delta in deltas for token in delta.token_ids] == expected[:tokens]
    assert sum(len(delta.logprobs) for delta in deltas) == tokens
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    assert_nothing_is_held(engine)


def test_a_stop_string_before_min_tokens_is_text(start_engine, tokenizer, model):
    engine = start_engine(k=4)
    expected = model.continuation([9, 8, 7], 40)
    stop = tokenizer.decode(expected[2:3])
    (result,) = engine.generate([9, 8, 7], params(stop=stop, min_tokens=10, max_tokens=40))
    assert len(result.token_ids) >= 10
    assert result.token_ids == expected[: len(result.token_ids)]
    assert result.text.startswith(tokenizer.decode(expected[:9]))


def test_log_probabilities_belong_to_their_tokens(start_engine, model):
    engine = start_engine(k=3)
    asks, more, silent = engine.generate(
        [[5, 6], [7, 8, 9], [4]],
        [params(logprobs=0, **FREE), params(logprobs=2, **FREE), params(**FREE)],
    )
    assert silent.logprobs is None
    for result, top in ((asks, 0), (more, 2)):
        start = len(result.prompt_token_ids)
        for position, (token, logprob) in enumerate(zip(result.token_ids, result.logprobs, strict=True), start):
            assert logprob.token_id == token
            assert logprob.logprob == pytest.approx(model.logprob(position, token))
            likeliest = [(token + i) % 384 for i in range(top)]
            assert list(logprob.top) == likeliest
            assert list(logprob.top.values()) == pytest.approx([model.logprob(position, each) for each in likeliest])


@pytest.mark.parametrize("token_budget", [3, 32])
@pytest.mark.parametrize("top", [0, 2])
def test_prompt_log_probabilities_come_once_each(start_engine, model, token_budget, top):
    """In chunks, with a prompt that the prefix cache holds, and next to rows that do not ask."""
    engine = start_engine(token_budget=token_budget)
    prompt = list(range(4, 24))
    engine.generate(prompt, params())
    plain, asks = engine.generate([[7, 7, 7], prompt], [params(), params(prompt_logprobs=top, n=2)])
    assert plain.prompt_logprobs is None
    first, *others = asks.prompt_logprobs
    assert first is None
    assert len(others) == 19
    for position, logprob in enumerate(others, 1):
        assert isinstance(logprob, TokenLogprob)
        assert logprob.token_id == prompt[position]
        assert logprob.logprob == pytest.approx(model.logprob(position, prompt[position]))
        assert len(logprob.top) == top


def test_prompt_log_probabilities_survive_preemption(start_engine, model):
    engine = start_engine(k=0, pages=20, page_size=2, max_model_len=41, slots=3, token_budget=7)
    asked = [params(max_tokens=30, prompt_logprobs=0, **FREE) for _ in range(3)]
    results = engine.generate([[n] * 8 for n in (5, 6, 7)], asked)
    assert engine.stats().preemptions > 0
    for result in results:
        assert result.token_ids == model.continuation(result.prompt_token_ids, 30)
        assert [logprob.token_id for logprob in result.prompt_logprobs[1:]] == result.prompt_token_ids[1:]


def test_n_answers_share_the_prompt(start_engine, model):
    engine = start_engine()
    prompt = list(range(4, 40))
    (result,) = engine.generate(prompt, params(n=3, **FREE))
    assert [completion.index for completion in result.completions] == [0, 1, 2]
    assert {tuple(completion.token_ids) for completion in result.completions} == {tuple(model.continuation(prompt, 24))}
    assert engine.stats().prefix_hit_tokens == 2 * 32
    assert sum(result.acceptance.drafted) == sum(engine.stats().drafted) > 0
    assert_nothing_is_held(engine)


def test_steps_and_totals_are_counted(start_engine):
    engine = start_engine(k=2)
    (result,) = engine.generate(list(range(4, 24)), params(**FREE))
    (again,) = engine.generate(list(range(4, 24)), params(**FREE))
    stats, steps = engine.stats(), engine.steps.last()
    assert (result.cached_tokens, again.cached_tokens, stats.prefix_hit_tokens) == (0, 16, 16)
    assert stats.prefix_lookup_tokens == stats.prompt_tokens == 40
    assert (stats.requests, stats.generated_tokens, stats.steps) == (2, 48, len(steps))
    assert [step.number for step in steps] == list(range(len(steps)))
    assert sum(step.prefill_tokens for step in steps) == 24
    assert sum(step.drafted for step in steps) == sum(stats.drafted)
    assert sum(step.accepted for step in steps) == sum(stats.accepted) > 0
    assert sum(step.decode_tokens for step in steps) == sum(step.drafted for step in steps) + sum(
        step.rows for step in steps if not step.prefill_tokens
    )
    assert {(step.verify_seconds, step.verify_exposed_seconds) for step in steps} == {(0.5, 0.0625)}
    assert {(step.draft_seconds, step.draft_exposed_seconds) for step in steps} == {(0.25, 0.03125)}
    first = [0, next(step.number for step in steps[1:] if step.prefill_tokens)]
    assert [step.number for step in steps if step.wait_seconds == 0] == first, "idling is not waiting for a plan"
    assert {step.wait_seconds for step in steps} == {0.0, 0.125}
    assert stats.wait_seconds == 0.125 * (len(steps) - 2)
    assert stats.exposed_seconds == (0.0625 + 0.03125) * len(steps)
    assert stats.rank_seconds == stats.wait_seconds + 0.75 * len(steps)
    assert result.acceptance + again.acceptance == type(result.acceptance)(stats.drafted, stats.accepted)


async def collect(engine, prompt, asked, **options):
    async with aclosing(engine.stream(prompt, asked, **options)) as stream:
        return [delta async for delta in stream]


def test_streams_say_what_generate_says(start_engine, tokenizer, model):
    engine = start_engine(k=3)

    async def both():
        return await asyncio.gather(
            collect(engine, PROMPT, params(**FREE)), collect(engine, [5, 6], params(n=2, prompt_logprobs=0, **FREE))
        )

    text, ids = asyncio.run(both())
    prompt = tokenizer.encode(PROMPT)
    expected = model.continuation(prompt, 24)
    assert "".join(delta.text for delta in text) == tokenizer.decode(expected)
    assert [token for delta in text for token in delta.token_ids] == expected
    assert text[0].prompt_token_ids == prompt
    assert all(delta.prompt_token_ids is None for delta in text[1:])
    assert [delta.finish_reason for delta in text[:-1]] == [None] * (len(text) - 1)
    assert sum(text[-1].acceptance.drafted) > 0
    assert [delta.prompt_logprobs is None for delta in ids].count(False) == 1
    for index in (0, 1):
        mine = [delta for delta in ids if delta.index == index]
        assert [token for delta in mine for token in delta.token_ids] == model.continuation([5, 6], 24)
        assert mine[-1].finish_reason == "length"
    assert_nothing_is_held(engine)


class Gate:
    """Lets a number of steps run, then holds the rank until it is opened."""

    def __init__(self, steps):
        self.left = steps
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, plan):
        self.left -= 1
        if self.left < 0:
            self.reached.set()
            assert self.opened.wait(30)


def test_a_closed_stream_frees_slot_and_pages_at_once(start_engine):
    gate = Gate(3)
    engine = start_engine(before=gate)

    async def read_two():
        stream = engine.stream([5, 6], params(max_tokens=100, n=3))
        await anext(stream)
        await anext(stream)
        gate.reached.wait(30)
        await stream.aclose()

    asyncio.run(read_two())
    assert_nothing_is_held(engine)  # while the rank is still in the step
    gate.opened.set()
    assert len(engine.generate([5], params())[0].token_ids) == 24
    assert engine.stats().aborted == 1


def test_a_cancelled_reader_frees_slot_and_pages(start_engine):
    gate = Gate(1)
    engine = start_engine(before=gate)

    async def cancel():
        reader = asyncio.create_task(collect(engine, [5, 6], params(max_tokens=100)))
        await asyncio.to_thread(gate.reached.wait, 30)
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader

    asyncio.run(cancel())
    assert_nothing_is_held(engine)
    gate.opened.set()


def test_a_closed_synchronous_stream_aborts(start_engine):
    engine = start_engine()
    stream = engine.generate_stream([[5], [6]], params(max_tokens=100))
    next(stream)
    stream.close()
    assert_nothing_is_held(engine)


@pytest.mark.parametrize("steps", [0, 2])
def test_abort_ends_a_stream_from_outside(start_engine, model, steps):
    gate = Gate(steps)
    engine = start_engine(before=gate)

    async def abort():
        reader = asyncio.create_task(collect(engine, [5, 6], params(n=2, max_tokens=100), request_id="mine"))
        await asyncio.to_thread(gate.reached.wait, 30)
        assert engine.abort("mine")
        assert not engine.abort("mine")
        return await reader

    deltas = asyncio.run(abort())
    assert [(d.index, d.finish_reason) for d in deltas if d.finish_reason] == [(0, "abort"), (1, "abort")]
    assert [d.prompt_token_ids for d in deltas] == [[5, 6]] + [None] * (len(deltas) - 1)
    gate.opened.set()
    for index in (0, 1):
        said = [token for delta in deltas if delta.index == index for token in delta.token_ids]
        assert said == model.continuation([5, 6], len(said))
    assert not engine.abort("unknown")


def test_a_stream_whose_event_loop_is_gone_ends_only_itself(start_engine, caplog):
    gate = Gate(1)
    engine = start_engine(before=gate)
    orphans = []

    async def leave():
        stream = engine.stream([5, 6], params(max_tokens=100, n=2))
        orphans.append(stream)
        await anext(stream)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave())
    loop.close()
    gate.opened.set()
    assert len(engine.generate([7], params())[0].token_ids) == 24
    assert_nothing_is_held(engine)
    assert "its stream takes no more" in caplog.text


@pytest.mark.parametrize(("tensor", "asked", "expected"), [(1, None, 1), (2, None, 2), (2, 1, 1), (1, 3, 3)])
def test_a_groups_next_plan_is_sent_before_the_result_is_in(start_engine, tensor, asked, expected):
    outstanding = []
    engine = start_engine(
        before=lambda _: outstanding.append(engine.stats().steps_in_flight), plans_in_flight=asked, tensor=tensor
    )
    engine.generate([5], params(max_tokens=40))
    assert max(outstanding) == expected


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_a_failed_rank_ends_every_request_with_the_root_cause(start_engine, caplog, plans_in_flight):
    cause = MemoryError("the device is on fire")

    def fail(plan):
        if plan.number[0] == 3:
            raise cause

    engine = start_engine(before=fail, plans_in_flight=plans_in_flight, slots=2)
    asked = params(max_tokens=100)

    async def all_fail():
        readers = [collect(engine, [n], asked) for n in range(4, 9)]
        sync = asyncio.to_thread(engine.generate, [[5], [6], [7]], asked)
        return await asyncio.gather(*readers, sync, return_exceptions=True)

    with caplog.at_level(logging.ERROR):
        errors = asyncio.run(all_fail())
    assert [type(error) for error in errors] == [EngineFailedError] * 6
    assert {error.__cause__ for error in errors} == {cause}
    assert [record.message for record in caplog.records] == ["the engine has failed"]
    for call in (
        lambda: engine.generate([5]),
        lambda: engine.stream([5]),
        lambda: engine.generate_stream([5]),
        engine.check_health,
    ):
        with pytest.raises(EngineFailedError, match="the device is on fire") as failed:
            call()
        assert failed.value.__cause__ is cause


@pytest.mark.parametrize("plans_in_flight", [1, 2])
@pytest.mark.parametrize("k", [0, 1, 3])
def test_tokens_come_from_where_the_acceptance_says(start_engine, k, plans_in_flight):
    engine = start_engine(k=k, plans_in_flight=plans_in_flight)
    for result in engine.generate([PROMPT, [5, 6, 7]], params(max_tokens=40, **FREE)):
        [completion] = result.completions
        assert len(completion.origins) == len(completion.token_ids) == 40
        assert completion.origins[0] == "plain"  # the prompt's last row has no drafts
        origins = Counter(completion.origins)
        lost = sum(result.acceptance.accepted) - origins["accepted"]  # by the limit, in the last step
        assert 0 <= lost <= k
        assert not k or origins["accepted"] > 0
        if k == 1:
            assert origins["bonus"] == origins["accepted"] - (completion.origins[-1] == "accepted")
        if not k:
            assert set(origins) == {"plain"}


def test_streams_tell_where_tokens_come_from_as_generate_does(start_engine):
    engine = start_engine(k=3)
    [whole] = engine.generate([PROMPT], params(stop="never said"))
    deltas = [delta for _, delta in engine.generate_stream([PROMPT], params(stop="never said"))]
    assert [each for delta in deltas for each in delta.origins] == whole.completions[0].origins
    assert [sum(delta.lengths) for delta in deltas] == [len(delta.text) for delta in deltas]


@pytest.mark.parametrize("plans_in_flight", [1, 2])
def test_so_many_steps_are_traced_as_were_asked_for(start_engine, plans_in_flight):
    traced = []
    engine = start_engine(before=lambda plan: traced.extend(plan.traced.tolist()), plans_in_flight=plans_in_flight)
    with ThreadPoolExecutor(1) as pool:
        trace = pool.submit(engine.trace_steps, 3, 30.0)
        while not trace.done():
            engine.generate([5], params(max_tokens=100, **FREE))
    assert trace.result() == []
    assert sum(traced) == 3
    first = traced.index(1)
    assert traced[first : first + 3] == [1, 1, 1]
    engine.generate([5], params(**FREE))
    assert sum(traced) == 3


def test_a_trace_ends_when_no_step_comes_and_there_is_one_at_a_time(start_engine, tmp_path):
    engine = start_engine()
    with engine.trace(tmp_path / "trace.json"), pytest.raises(TraceInProgressError, match="traced already"):
        engine.trace_steps(1, 30.0)
    assert engine.trace_steps(1, 0.01) == []
    with engine.trace(tmp_path / "trace.json"):
        engine.generate([5], params(**FREE))


def test_a_trace_of_so_many_steps_says_that_its_ranks_failed(start_engine):
    """At once, and whether they failed in a traced step or before the next one was planned."""
    tracing = Event()

    def fail(plan):
        if plan.traced[0]:
            tracing.set()
            raise MemoryError("the device is on fire")

    engine = start_engine(before=fail, restarts=1)
    with ThreadPoolExecutor(1) as pool:
        trace = pool.submit(engine.trace_steps, 1, 60.0)
        while not tracing.is_set():
            engine.generate([5], params(**FREE))
        with pytest.raises(EngineFailedError, match="failed under the trace"):
            trace.result(30)


def test_a_rank_that_fails_under_a_trace_ends_it_at_once(start_engine, tmp_path):
    traced = []

    def fail(plan):
        traced.extend(plan.traced.tolist())
        if sum(traced) == 3:
            raise MemoryError("the device is on fire")

    engine = start_engine(before=fail, plans_in_flight=2)
    engine.generate([5], params(max_tokens=1))
    with pytest.raises(EngineFailedError, match="the device is on fire"), engine.trace(tmp_path / "trace.json"):
        engine.generate([5], params(max_tokens=100))
    assert traced[0] == 0
    assert traced[-3:] == [1, 1, 1]
    engine.close()
    assert start_engine.channel.closed == 1


def test_a_silent_rank_is_noticed(start_engine):
    gate = Gate(0)
    engine = start_engine(before=gate)
    engine.check_health(0.0)
    stream = engine.stream([5], params())

    async def watch():
        reader = asyncio.create_task(anext(stream))
        await asyncio.to_thread(gate.reached.wait, 30)
        engine.check_health(60.0)
        with pytest.raises(EngineFailedError, match="stuck"):
            engine.check_health(0.0)
        gate.opened.set()
        await reader
        await stream.aclose()

    asyncio.run(watch())


def test_a_rank_that_is_silent_for_too_long_has_failed(start_engine):
    def silent(plan):
        raise TimeoutError

    engine = start_engine(before=silent, step_timeout=1e-9)
    with pytest.raises(EngineFailedError, match="a step brought no result within 0 s"):
        engine.generate([5], params())


def test_closing_ends_open_requests_and_may_be_repeated(start_engine):
    polled = threading.Event()

    def silent(plan):
        polled.set()
        raise TimeoutError

    engine = start_engine(before=silent)

    async def close():
        reader = asyncio.create_task(collect(engine, [5], params()))
        await asyncio.to_thread(polled.wait, 30)
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineFailedError, match="the engine was closed"):
            await reader

    asyncio.run(close())
    engine.close()
    for call in (lambda: engine.generate([5]), engine.check_health):
        with pytest.raises(EngineFailedError, match="the engine is closed"):
            call()


def test_the_model_is_loaded_on_the_thread_that_runs_it(start_engine, tokenizer):
    """A second OpenMP pool in the process would slow every step down."""
    threads = set()
    with start_engine(before=lambda plan: threads.add(threading.get_ident())) as first:
        channel, info, config = start_engine.channel, first.info, first.config

        def start(_):
            threads.add(threading.get_ident())
            return channel, info

        with Engine(config, start=start, tokenizer=tokenizer) as engine:
            engine.generate([[5, 6]], params(max_tokens=4))
    assert len(threads) == 1
    assert threads != {threading.get_ident()}


def test_a_model_that_cannot_be_loaded_ends_the_thread_too(start_engine, tokenizer):
    with start_engine() as first:
        config = first.config

    def start(_):
        raise ConfigurationError("no such model")

    with pytest.raises(ConfigurationError, match="no such model"):
        Engine(config, start=start, tokenizer=tokenizer)
    assert not any(thread.name == "raysonar-engine" for thread in threading.enumerate())


def test_an_engine_that_nobody_holds_ends_its_thread(start_engine, tokenizer):
    with start_engine() as engine:
        assert any(thread.name == "raysonar-engine" for thread in threading.enumerate())
    channel, info = start_engine.channel, engine.info
    config = engine.config
    other = Engine(config, start=lambda _: (channel, info), tokenizer=tokenizer)
    closed = channel.closed
    del other
    gc.collect()
    assert channel.closed == closed + 1
    assert not any(thread.name == "raysonar-engine" for thread in threading.enumerate())


def test_more_than_find_a_slot_or_may_wait_are_refused_as_a_whole(start_engine):
    engine = start_engine(slots=2, max_waiting=3)
    with pytest.raises(QueueFullError, match="0 answers are waiting and 6 more were asked for; 5 find room"):
        engine.generate([[5]] * 6, params())
    with pytest.raises(QueueFullError):
        engine.generate([5], params(n=6))
    assert engine.stats().requests == 0
    assert len(engine.generate([5], params(n=5))[0].completions) == 5


def test_a_request_id_is_used_once_at_a_time(start_engine):
    gate = Gate(0)
    engine = start_engine(before=gate)

    async def twice():
        first = asyncio.create_task(collect(engine, [5], params(), request_id="same"))
        await asyncio.to_thread(gate.reached.wait, 30)
        with pytest.raises(InvalidRequestError, match="'same' is in use"):
            await collect(engine, [6], params(), request_id="same")
        gate.opened.set()
        await first
        return await collect(engine, [6], params(), request_id="same")

    assert asyncio.run(twice())[-1].finish_reason == "length"


def test_bad_requests_are_refused_before_anything_is_queued(start_engine):
    engine = start_engine()
    for prompt in ([], [384], [5] * 128, "long " * 99):
        for call in (engine.generate, engine.stream, engine.generate_stream):
            with pytest.raises(InvalidRequestError) as refused:
                call(prompt if call == engine.stream else [[5], prompt], params())
            assert refused.value.field == "prompt"
    with pytest.raises(InvalidRequestError, match="a prompt is a text or a list of token ids, got 5"):
        engine.generate(["text", 5])
    assert engine.stats().requests == 0


def test_a_model_without_a_tokenizer_takes_token_ids_only(start_engine, tmp_path, model):
    engine = start_engine(tokenizer=Tokenizer(tmp_path, None, {}))
    with pytest.raises(InvalidRequestError, match="token ids"):
        engine.generate("text")
    with pytest.raises(InvalidRequestError, match="tokenizer") as refused:
        engine.generate([5], params(stop="a"))
    assert refused.value.field == "stop"
    (result,) = engine.generate([5], params())
    assert (result.token_ids, result.text) == (model.continuation([5], 24), "")


def test_options_that_cannot_work_are_refused_by_name(tmp_path):
    with pytest.raises(ConfigurationError, match="tokens: 5 is for a draft model"):
        Engine.from_folder(tmp_path, speculative_tokens=5)
    with pytest.raises(ConfigurationError, match="page_size"):
        Engine.from_folder(tmp_path, page_size=0)
