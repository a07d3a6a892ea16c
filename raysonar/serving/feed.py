"""How batches of deltas go from drivers to an ingress: over a TCP connection of their own.

An item of Serve's own streams costs 1 to 2 ms of processor time in the process that runs the engine. Here all that is
ready for an ingress travels as one message. Serve still carries the request: it routes, counts and cancels it, and
tells when a driver is lost.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager, suppress
from typing import Any

import msgspec

from raysonar.serving.generation import Batch, Reader
from raysonar.serving.problems import ProblemError, unavailable

_SECRET_BYTES = 16
_LENGTH_BYTES = 8
_CONNECT_S = 5.0
_LATE_S = 10.0
"""How long nothing at all may have come of a generation that its driver has done with, until it counts as lost."""
_AGAIN_S = 30.0
"""An ingress that could not be reached is not tried for so long."""
_OPTIONS = {"TCP_KEEPIDLE": 4, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3, "TCP_USER_TIMEOUT": 30_000}
"""Where the system has them. A host that is gone is noticed in ten seconds while nothing is sent, and in 30 while there
is; so long an ingress may stand still before its driver gives it up."""
_BEAT_S = 2.0
"""So often a driver is heard, whether it has anything to say or not."""
_SILENT_BEATS = 15

logger = logging.getLogger("ray.serve")

Parcel = tuple[str, Batch | None]
"""A generation's id and its next batch; None behind the last one."""
_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(list[Parcel])


def _lost() -> ProblemError:
    """Of its own for each stream: an error keeps the frames that it has passed."""
    return unavailable("The connection between ingress and driver is lost", "engine_unavailable")


def _framed(message: bytes) -> bytes:
    return len(message).to_bytes(_LENGTH_BYTES, "little") + message


def _keep_alive(writer: asyncio.StreamWriter) -> None:
    connection: socket.socket = writer.get_extra_info("socket")
    with suppress(OSError):
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _OPTIONS.items():
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Feed:
    """An ingress's end: takes connections of drivers, and gives each generation what is for it."""

    def __init__(self, host: str, end: Callable[[str], None]) -> None:
        """`host`: the address at which drivers reach this process. `end`: called, in a thread, with the name of a
        driver that hangs."""
        self._host, self._end = host, end
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._server: asyncio.Server | None = None
        self._unable = False
        self._starting = asyncio.Lock()
        self._open: dict[str, FedStream] = {}

    async def reader(self) -> Reader | None:
        """What drivers need to reach this, which listens from the first call on; None where it cannot."""
        async with self._starting:
            if self._server is None and not self._unable:
                try:
                    self._server = await asyncio.start_server(self._serve, self._host, 0)
                except OSError as error:
                    self._unable = True
                    logger.warning("Tokens come with Serve's streams, which is slower: %s: %s", self._host, error)
        if self._server is None:
            return None
        return Reader(self._host, self._server.sockets[0].getsockname()[1], self._secret)

    def opened(self, generation_id: str, stream: Any) -> "FedStream":
        """The batches of a generation that was sent with this feed's reader; `stream` is what Serve returned."""
        fed = self._open[generation_id] = FedStream(stream)
        fed.watch.add_done_callback(lambda _: self._open.pop(generation_id))
        return fed

    async def _serve(self, stream: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """Of one driver."""
        source = _Source(stream)
        watch = asyncio.create_task(self._watch(source, back))
        try:
            _keep_alive(back)
            async with asyncio.timeout(_CONNECT_S):
                said = await stream.readexactly(_SECRET_BYTES)
            if not secrets.compare_digest(said, self._secret):
                return
            source.name = (await source.message()).decode()
            while True:
                for generation_id, batch in _DECODER.decode(await source.message()):
                    if (fed := self._open.get(generation_id)) is not None:
                        fed.take(batch, source)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return
        except msgspec.MsgspecError:
            logger.exception("A driver sends what is not understood; is it of another version?")
        except asyncio.CancelledError:
            return  # the loop ends; Python 3.11's server does not expect a task that was cancelled
        finally:
            watch.cancel()
            back.close()
            for fed in self._open.values():
                fed.lose(source)

    async def _watch(self, source: "_Source", back: asyncio.StreamWriter) -> None:
        """End a driver that has been silent for too long although its connection is up: its process hangs.

        Serve would wait for the end of its streams, which never comes. Beats are counted, not seconds: a time in which
        this loop stood still is no silence.
        """
        heard, silent = -1, 0
        while silent < _SILENT_BEATS:
            await asyncio.sleep(_BEAT_S)
            silent = silent + 1 if source.heard == heard else 0
            heard = source.heard
        logger.error("The driver %s was not heard for %.0f s and is ended", source.name, _SILENT_BEATS * _BEAT_S)
        await asyncio.to_thread(self._end, source.name)
        back.close()


class _Source:
    """A driver's connection, at the ingress."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._stream = stream
        self.name = ""
        self.heard = 0
        """Messages."""

    async def message(self) -> bytes:
        size = int.from_bytes(await self._stream.readexactly(_LENGTH_BYTES), "little")
        message = await self._stream.readexactly(size)
        self.heard += 1
        return message


class FedStream:
    """A generation's batches, wherever they come from: an async iterator."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._queue: asyncio.Queue[Batch | Exception | None] = asyncio.Queue()
        self._source: _Source | None = None
        """The connection that batches come from, until the last one has come."""
        self._ended = asyncio.Event()
        self.watch = asyncio.create_task(self._until_serve_ends_it())
        """Runs until the driver has done with the generation, and the end was read."""

    def take(self, batch: Batch | None, source: _Source) -> None:
        """What has come from a connection."""
        self._source = source if batch is not None else None
        self._queue.put_nowait(batch)

    def lose(self, source: _Source) -> None:
        """The connection has ended."""
        if self._source is source:
            self._queue.put_nowait(_lost())

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self

    async def __anext__(self) -> Batch:
        item = await self._queue.get()
        if isinstance(item, Exception):
            raise item
        if item is None:
            self._ended.set()
            raise StopAsyncIteration
        return item

    async def _until_serve_ends_it(self) -> None:
        came = False
        try:
            async for batch in self._stream:  # of a driver that cannot reach the feed
                came = True
                self._queue.put_nowait(batch)
        except Exception as error:
            self._queue.put_nowait(error)
            return
        except asyncio.CancelledError:
            self._queue.put_nowait(_lost())  # it was Serve, if anybody still reads
            raise
        if came:
            self._queue.put_nowait(None)
            return
        try:
            async with asyncio.timeout(_LATE_S):
                await self._ended.wait()
        except TimeoutError:
            self._queue.put_nowait(_lost())

    def cancel(self) -> None:
        """Stop the generation, if it has not come to its end."""
        if not self._ended.is_set():
            self.watch.cancel()
            self._stream.cancel()


class Wire:
    """A driver's connection to an ingress. All that is sent before the loop comes round travels together."""

    def __init__(self, source: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._parcels: list[msgspec.Raw] = []
        self._gone: list[Callable[[], None]] = []
        self.is_open = True
        writer.transport.set_write_buffer_limits(high=0)  # drain() waits until the system has taken all
        self._tasks = asyncio.create_task(self._until_closed(source)), asyncio.create_task(self._beat())

    @classmethod
    async def to(cls, reader: Reader, name: str) -> "Wire":
        """`name`: of the driver's actor. Raises OSError and TimeoutError."""
        async with asyncio.timeout(_CONNECT_S):
            source, writer = await asyncio.open_connection(reader.host, reader.port)
        _keep_alive(writer)
        writer.write(reader.secret + _framed(name.encode()))
        return cls(source, writer)

    @contextmanager
    def watched(self, gone: Callable[[], None]) -> Iterator[None]:
        """Call `gone` when the connection ends before the block does, or has ended."""
        self._gone.append(gone)
        if not self.is_open:
            gone()
        try:
            yield
        finally:
            self._gone.remove(gone)

    async def send(self, generation_id: str, batch: Batch | None) -> None:
        """What is for an ingress that is gone is dropped; one that is slow is waited for."""
        # encoded here, so that what cannot be is its own stream's error
        self._parcels.append(msgspec.Raw(_ENCODER.encode((generation_id, batch))))
        if len(self._parcels) == 1:
            asyncio.get_running_loop().call_soon(self._flush)
        if self._writer.transport.get_write_buffer_size():
            await self._drained()

    async def flushed(self) -> None:
        """The system has taken all that was sent."""
        await asyncio.sleep(0)
        await self._drained()

    async def _drained(self) -> None:
        with suppress(OSError):
            await self._writer.drain()

    def _flush(self) -> None:
        message = _framed(_ENCODER.encode(self._parcels))
        self._parcels.clear()
        if self.is_open:
            self._writer.write(message)

    async def _beat(self) -> None:
        while self.is_open:
            self._flush()
            await asyncio.sleep(_BEAT_S)

    async def _until_closed(self, source: asyncio.StreamReader) -> None:
        try:
            with suppress(OSError):
                await source.read()
        finally:
            self.is_open = False
            self._writer.close()
            for gone in list(self._gone):
                gone()


class Link:
    """A driver's way to one ingress: a connection, while there is one."""

    def __init__(self, reader: Reader, name: str) -> None:
        """`name`: of the driver's actor."""
        self._reader, self._name = reader, name
        self._wire: Wire | None = None
        self._connecting = asyncio.Lock()
        self._not_before = 0.0

    async def wire(self) -> Wire | None:
        """None for an ingress that cannot be reached. Raises ConnectionError for one that could be, and is gone."""
        async with self._connecting:
            if self._wire is not None and self._wire.is_open:
                return self._wire
            now = asyncio.get_running_loop().time()
            if now < self._not_before:
                return None
            try:
                self._wire = await Wire.to(self._reader, self._name)
            except (OSError, TimeoutError) as error:
                if self._wire is not None:
                    raise ConnectionError(f"the ingress at {self._reader.host} is gone") from error
                self._not_before = now + _AGAIN_S
                logger.warning(
                    "Tokens go with Serve's streams, which is slower: the ingress cannot be reached at %s, port %d: %s",
                    *(self._reader.host, self._reader.port, str(error) or type(error).__name__),
                )
            return self._wire


async def feed(wire: Wire, generation_id: str, batches: AsyncGenerator[Batch]) -> None:
    """Send all of a generation, after an empty batch that says that it has arrived."""
    async with aclosing(batches):
        await wire.send(generation_id, [])
        async for batch in batches:
            await wire.send(generation_id, batch)
        await wire.send(generation_id, None)
        await wire.flushed()
