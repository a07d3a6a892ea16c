"""The rows that are still to be answered, shared by all replicas."""

import asyncio
from collections import deque
from collections.abc import Iterator
from itertools import islice

from raysonar.batch.rows import Row
from raysonar.errors import RaysonarError


class InputError(RaysonarError, OSError):
    """The input cannot be read on."""


class Supply:
    """Hands rows out; takes back those of a replica that was lost."""

    def __init__(self, rows: Iterator[Row]) -> None:
        """`rows` are read in a thread of their own, one call at a time."""
        self._rows = rows
        self._returned: deque[Row] = deque()
        self._exhausted = False
        self._failure: InputError | None = None
        self._out = 0
        """Rows handed out and neither done nor returned."""
        self._changed = asyncio.Condition()

    async def take(self, count: int, *, wait: bool) -> list[Row]:
        """Up to `count` rows, or none when there are none now; with `wait`, none means that all rows are done."""
        async with self._changed:
            while True:
                fresh = [self._returned.popleft() for _ in range(min(count, len(self._returned)))]
                fresh += await self._read(count - len(fresh))
                if fresh or not wait or not self._out:
                    self._out += len(fresh)
                    return fresh
                await self._changed.wait()

    async def _read(self, count: int) -> list[Row]:
        if self._failure is not None:
            raise self._failure
        if self._exhausted or not count:
            return []
        try:
            read = await asyncio.to_thread(list, islice(self._rows, count))
        except Exception as error:  # whoever takes rows must hear of it: an end would look like success
            self._failure = InputError(f"the input cannot be read: {error or type(error).__name__}")
            raise self._failure from error
        self._exhausted = len(read) < count
        return read

    async def more(self) -> bool:
        """Whether there are rows to answer; waits while other takers may give some back."""
        rows = await self.take(1, wait=True)
        await self.give_back(rows)
        return bool(rows)

    async def done(self, count: int) -> None:
        """So many rows that were handed out are finished."""
        async with self._changed:
            self._out -= count
            self._changed.notify_all()

    async def give_back(self, rows: list[Row]) -> None:
        """Rows that were handed out and not answered."""
        async with self._changed:
            self._out -= len(rows)
            self._returned.extendleft(reversed(rows))
            self._changed.notify_all()
