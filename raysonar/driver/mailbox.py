"""From the engine's thread to an event loop."""

import asyncio
import threading
from collections import deque

from raysonar.driver.outputs import Delta
from raysonar.errors import RaysonarError


class Mailbox:
    """Carries deltas from the engine's thread to one stream's event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: deque[Delta | RaysonarError] = deque()
        self._filled: asyncio.Event | None = None
        self._home: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Deliver to the running event loop."""
        self._home, self._filled = asyncio.get_running_loop(), asyncio.Event()

    def put(self, item: Delta | RaysonarError) -> None:
        """From any thread; one wake-up serves all that is there when the stream looks."""
        assert self._home is not None
        assert self._filled is not None
        with self._lock:
            self._items.append(item)
            first = len(self._items) == 1
        if first:
            self._home.call_soon_threadsafe(self._filled.set)

    async def take(self) -> list[Delta | RaysonarError]:
        """All that has come; waits for something."""
        assert self._filled is not None
        await self._filled.wait()
        self._filled.clear()
        with self._lock:
            items = list(self._items)
            self._items.clear()
        return items


def settle(finished: asyncio.Future[None], error: RaysonarError | None) -> None:
    """To be called on the future's loop: end a wait, with an error or without."""
    if finished.done():  # nobody waits any more
        return
    if error is None:
        finished.set_result(None)
    else:
        finished.set_exception(error)
