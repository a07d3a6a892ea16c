"""What a driver sends an ingress arrives, each batch where it belongs; and what follows when one end is lost."""

import asyncio
import socket
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from raysonar.driver.outputs import Acceptance, Delta, TokenLogprob
from raysonar.observe.answers import Moments
from raysonar.serving import feed as feed_module
from raysonar.serving.feed import FedStream, Feed, Link, Wire, feed
from raysonar.serving.generation import Batch, Reader
from raysonar.serving.problems import Problem, ProblemError

HOST = "127.0.0.1"


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    """On uvloop, as Ray's workers do, where there is one."""
    return uvloop.run(asyncio.wait_for(work(), 20))


def batch(number: int, size: int = 1) -> Batch:
    return [(0, Delta(place, f"text {number}", [number] * 3)) for place in range(size)]


counts = st.integers(0, 10**9)
words = st.none() | st.text()
floats = st.floats(allow_nan=False)
logprobs = st.builds(TokenLogprob, counts, floats, st.dictionaries(counts, floats, max_size=3))
numbers = st.tuples(counts, counts)
moments = st.builds(Moments, floats, floats, st.none() | floats, st.none() | floats, tokens=counts)
deltas = st.builds(
    Delta,
    counts,
    st.text(),
    st.lists(counts, max_size=4),
    st.none() | st.lists(logprobs, max_size=3),
    st.sampled_from([None, "stop", "length", "abort"]),
    st.none() | st.text() | counts,
    st.none() | st.lists(counts, max_size=4),
    st.none() | st.lists(st.none() | logprobs, max_size=3),
    counts,
    st.none() | st.builds(Acceptance, numbers, numbers),
    st.none() | moments,
    st.lists(st.sampled_from(["accepted", "recovered", "bonus", "plain"]), max_size=3),
    st.lists(counts, max_size=4),
)
problems = st.builds(Problem, st.integers(400, 599), st.text(), st.text(), words, words)


async def endless(*first: Batch) -> AsyncGenerator[Batch]:
    """The batches again and again; or nothing, and no end."""
    while True:
        await asyncio.sleep(0.001)
        for one in first:
            yield one


async def each(*batches: Batch, pause: bool = False) -> AsyncGenerator[Batch]:
    for one in batches:
        if pause:
            await asyncio.sleep(0)
        yield one


async def collected(stream: FedStream) -> list[Batch]:
    return [one async for one in stream]


class Served:
    """As Serve's stream of a driver: runs its work, yields what that yields, and is cancelled with it."""

    def __init__(self, work: AsyncGenerator[Batch]) -> None:
        self._work = work
        self.cancelled = False

    def __aiter__(self) -> "Served":
        return self

    async def __anext__(self) -> Batch:
        return await anext(self._work)

    def cancel(self) -> None:
        self.cancelled = True


async def wired(reader: Reader, name: str = "driver") -> Wire:
    """Another driver's end."""
    wire = await Link(reader, name).wire()
    assert wire is not None
    return wire


async def linked(end: Callable[[str], None] = print) -> tuple[Feed, Reader, Wire]:
    """An ingress's end, and a driver's."""
    ingress = Feed(HOST, end)
    reader = await ingress.reader()
    assert reader is not None
    return ingress, reader, await wired(reader)


async def sent(wire: Wire, name: str, batches: AsyncGenerator[Batch]) -> AsyncGenerator[Batch]:
    """A driver's stream that has a wire."""
    await feed(wire, name, batches)
    for never in ():
        yield never


def lost(error: pytest.ExceptionInfo[ProblemError]) -> bool:
    """Whether the request is sent again."""
    return error.value.problem.code == "engine_unavailable"


@pytest.mark.parametrize("pause", [False, True])
@pytest.mark.parametrize("loop", [asyncio, uvloop])
def test_every_generation_gets_its_batches_in_order(loop: Any, pause: bool):
    async def work() -> None:
        ingress, reader, wire = await linked()
        assert await ingress.reader() == reader
        scripts = {f"g{number}": [batch(number * 100 + k, 1 + k % 3) for k in range(number)] for number in range(12)}
        scripts["large"] = [batch(1, 2000), batch(2, 5000)]
        streams = [
            ingress.opened(name, Served(sent(wire, name, each(*script, pause=pause))))
            for name, script in scripts.items()
        ]
        for stream, script in zip(await asyncio.gather(*map(collected, streams)), scripts.values(), strict=True):
            assert stream == [[], *script]
        await asyncio.gather(*(stream.watch for stream in streams))
        await asyncio.sleep(0)
        assert not ingress._open

    loop.run(asyncio.wait_for(work(), 20))


def test_all_streams_to_an_ingress_share_a_connection():
    async def work() -> None:
        reader = await Feed(HOST, print).reader()
        assert reader is not None
        link = Link(reader, "driver")
        first, *others = await asyncio.gather(*(link.wire() for _ in range(8)))
        assert all(other is first for other in others)

    run(work)


def test_what_is_ready_together_travels_as_one_message(monkeypatch: pytest.MonkeyPatch):
    async def work() -> None:
        messages: list[bytes] = []
        _, _, wire = await linked()
        monkeypatch.setattr(wire._writer, "write", messages.append)
        await asyncio.gather(*(wire.send(f"g{number}", batch(number)) for number in range(32)))
        await wire.flushed()
        counts = [len(msgspec.msgpack.decode(message[8:])) for message in messages]
        assert [count for count in counts if count] == [32]  # the others are beats

    run(work)


def test_what_cannot_be_sent_is_an_error_of_its_own_stream_only():
    async def work() -> None:
        ingress, _, wire = await linked()
        unfit: Batch = [(0, Delta(0, "\ud800", [1]))]
        scripts = {"good": [batch(1), batch(2), batch(3)], "bad": [batch(1), unfit, batch(3)]}
        good, bad = (
            ingress.opened(name, Served(sent(wire, name, each(*script, pause=True))))
            for name, script in scripts.items()
        )
        results = await asyncio.gather(collected(good), collected(bad), return_exceptions=True)
        assert results[0] == [[], *scripts["good"]]
        assert isinstance(results[1], UnicodeEncodeError)

    run(work)


def test_a_problem_arrives_as_one():
    async def work() -> None:
        ingress, _, wire = await linked()
        served = Served(sent(wire, "g", each(Problem(400, "no"))))
        assert await collected(ingress.opened("g", served)) == [[], Problem(400, "no")]

    run(work)


@pytest.mark.parametrize("secret", [b"", b"short", b"x" * 16, b"x" * 64, None], ids=str)
def test_nothing_is_taken_that_comes_without_the_secret(secret: bytes | None):
    async def work() -> None:
        ingress = Feed(HOST, print)
        reader = await ingress.reader()
        assert reader is not None
        stream = ingress.opened("g", Served(endless()))
        message = msgspec.msgpack.encode([("g", batch(1)), ("g", None)])
        name = len(b"driver").to_bytes(8, "little") + b"driver"
        source, writer = await asyncio.open_connection(reader.host, reader.port)
        said = reader.secret if secret is None else secret
        writer.write(said + name + len(message).to_bytes(8, "little") + message)
        writer.write_eof()
        with suppress(ConnectionResetError):
            assert await source.read() == b""  # turned away, or done
        assert stream._queue.empty() == (secret is not None)
        stream.cancel()

    run(work)


def test_a_driver_that_sends_something_else_is_hung_up_on(caplog: pytest.LogCaptureFixture):
    async def work() -> None:
        reader = await Feed(HOST, print).reader()
        assert reader is not None
        source, writer = await asyncio.open_connection(reader.host, reader.port)
        message = msgspec.msgpack.encode([("g", {"other": 1})])
        writer.write(reader.secret + bytes(8) + len(message).to_bytes(8, "little") + message)
        assert await source.read() == b""

    run(work)
    assert "of another version" in caplog.text


@given(st.lists(st.tuples(st.text(), st.one_of(st.none(), problems, st.lists(st.tuples(counts, deltas)))), max_size=5))
def test_whatever_a_driver_says_is_read_as_it_was_said(parcels: list[Any]):
    message = feed_module._ENCODER.encode([msgspec.Raw(feed_module._ENCODER.encode(parcel)) for parcel in parcels])
    assert feed_module._DECODER.decode(message) == parcels


def test_a_secret_is_not_shown():
    assert "hidden" not in repr(Reader(HOST, 1, b"hidden"))


def test_an_ingress_that_is_gone_is_noticed_at_once_and_what_comes_for_it_is_refused():
    async def work() -> None:
        with socket.create_server((HOST, 0)) as server:
            link = Link(Reader(HOST, server.getsockname()[1], bytes(16)), "driver")
            wire = await link.wire()
            assert wire is not None
            connection, _ = server.accept()
            gone = asyncio.Event()
            with wire.watched(gone.set):
                await wire.send("g", batch(1))
                assert not gone.is_set()
                connection.close()
                await gone.wait()
                await wire.send("g", batch(2))
            again = asyncio.Event()
            with wire.watched(again.set):
                assert again.is_set()
            assert await link.wire() is not wire  # another connection to the same address
            server.accept()[0].close()
        second = await link.wire()
        assert second is not None
        while second.is_open:
            await asyncio.sleep(0.001)
        with pytest.raises(ConnectionError, match="is gone"):
            await link.wire()

    run(work)


def test_an_ingress_that_cannot_be_reached_is_no_error_said_once_and_not_tried_again_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    tried: list[Reader] = []

    async def silent(reader: Reader, name: str) -> Wire:
        tried.append(reader)
        raise TimeoutError

    monkeypatch.setattr(Wire, "to", silent)

    async def work() -> None:
        link = Link(Reader(HOST, 1, bytes(16)), "driver")
        assert await asyncio.gather(*(link.wire() for _ in range(4))) == [None] * 4
        monkeypatch.setattr(feed_module, "_AGAIN_S", 0.0)
        link._not_before = 0.0
        assert await link.wire() is None

    run(work)
    assert len(tried) == 2
    assert len(caplog.records) == 2
    for record in caplog.records:
        assert record.message.endswith("the ingress cannot be reached at 127.0.0.1, port 1: TimeoutError")


def test_an_address_that_cannot_be_listened_on_is_no_error_and_said_once(caplog: pytest.LogCaptureFixture):
    async def work() -> None:
        ingress = Feed("203.0.113.1", print)  # of nobody
        assert [await ingress.reader(), await ingress.reader()] == [None, None]

    run(work)
    assert len([record for record in caplog.records if "203.0.113.1" in record.message]) == 1


def test_batches_that_come_with_serve_s_own_stream_are_taken_from_there():
    async def work() -> None:
        assert await collected(Feed(HOST, print).opened("g", Served(each([], batch(1), batch(2))))) == [
            [],
            batch(1),
            batch(2),
        ]

    run(work)


@pytest.mark.parametrize("error", [ConnectionError("the driver has died"), asyncio.CancelledError()], ids=repr)
def test_an_end_that_serve_brings_ends_the_stream(error: BaseException):
    async def broken() -> AsyncGenerator[Batch]:
        await asyncio.sleep(0)
        raise error
        yield []

    async def work() -> None:
        stream = Feed(HOST, print).opened("g", Served(broken()))
        with pytest.raises((ConnectionError, ProblemError)):
            await anext(stream)

    run(work)


def test_batches_that_never_arrive_are_a_lost_driver(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(feed_module, "_LATE_S", 0.01)

    async def work() -> None:
        stream = Feed(HOST, print).opened("g", Served(each()))
        with pytest.raises(ProblemError) as error:
            await anext(stream)
        assert lost(error)

    run(work)


def test_a_connection_that_breaks_ends_all_its_streams_at_once():
    """While both ends are well; those of another driver go on."""

    async def work() -> None:
        ingress, reader, wire = await linked()
        other = await wired(reader)
        broken = [ingress.opened(name, Served(sent(wire, name, endless(batch(1))))) for name in ("a", "b")]
        complete = ingress.opened("c", Served(sent(wire, "c", each(batch(1)))))
        well = ingress.opened("d", Served(sent(other, "d", endless(batch(2)))))
        for stream in (*broken, complete, well):
            assert [await anext(stream), await anext(stream)][0] == []
        wire._writer.transport.abort()
        errors = []
        for stream in broken:
            with pytest.raises(ProblemError) as error:
                await collected(stream)
            assert lost(error)
            errors.append(error.value)
        assert errors[0] is not errors[1]  # an error keeps the frames that it has passed
        assert await collected(complete) == []
        assert await anext(well) == batch(2)
        for stream in (*broken, well):
            stream.cancel()

    run(work)


def test_a_driver_that_hangs_is_ended_by_its_name_and_its_streams_are_lost(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(feed_module, "_BEAT_S", 0.02)
    ended: list[str] = []

    async def work() -> None:
        ingress, reader, well = await linked(ended.append)
        hangs = await wired(reader, "hangs")
        streams = [
            ingress.opened(name, Served(sent(wire, name, endless(batch(1)))))
            for name, wire in (("a", hangs), ("b", well))
        ]
        for stream in streams:
            assert await anext(stream) == []
        monkeypatch.setattr(hangs, "_flush", lambda: None)  # nothing comes any more, and the connection stays
        with pytest.raises(ProblemError) as error:
            await collected(streams[0])
        assert lost(error)
        for _ in range(20):
            await anext(streams[1])
        streams[1].cancel()

    run(work)
    assert ended == ["hangs"]


def test_an_idle_driver_is_heard_and_an_ingress_that_stood_still_blames_nobody(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(feed_module, "_BEAT_S", 0.02)
    ended: list[str] = []

    async def work() -> None:
        _, _, wire = await linked(ended.append)
        for _ in range(3):
            await asyncio.sleep(0.2)
            time.sleep(0.5)  # more than 15 beats
        assert wire.is_open

    run(work)
    assert ended == []


@pytest.mark.parametrize("whole", [False, True])
def test_a_stream_that_is_left_is_cancelled_and_one_that_has_ended_is_not(whole: bool):
    async def work() -> None:
        ingress, _, wire = await linked()
        served = Served(sent(wire, "g", each(batch(1), batch(2))))
        stream = ingress.opened("g", served)
        await (collected(stream) if whole else anext(stream))
        stream.cancel()
        await asyncio.gather(stream.watch, return_exceptions=True)
        await asyncio.sleep(0)
        assert served.cancelled == (not whole)
        assert not ingress._open

    run(work)


@pytest.mark.parametrize("turns", [*range(12), 30, 100])
def test_a_driver_that_is_cancelled_at_any_time_closes_its_batches(turns: int):
    async def work() -> None:
        begun, closed = [], []

        async def batches() -> AsyncGenerator[Batch]:
            begun.append(1)
            try:
                while True:
                    await asyncio.sleep(0)
                    yield batch(0)
            finally:
                closed.append(1)

        _, _, wire = await linked()
        task = asyncio.create_task(feed(wire, "g", batches()))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert begun == closed
        assert not wire._gone

    run(work)


def test_late_batches_of_an_attempt_that_was_given_up_reach_nobody():
    async def work() -> None:
        ingress, _, wire = await linked()
        first = ingress.opened("g", Served(sent(wire, "g", each())))
        await anext(first)
        first.cancel()
        await asyncio.gather(first.watch, return_exceptions=True)
        second = ingress.opened("g-again1", Served(sent(wire, "g-again1", each(batch(2)))))
        await wire.send("g", batch(1))
        assert await collected(second) == [[], batch(2)]

    run(work)
