"""The time that a request may take."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import TypeVar

from raysonar.serving.problems import out_of_time

Item = TypeVar("Item")


def shorter(wanted: float | None, most: float | None) -> float | None:
    """The seconds that a request gets: what it asks for, within what the service allows."""
    given = [seconds for seconds in (wanted, most) if seconds is not None]
    return min(given, default=None)


async def within(seconds: float | None, items: AsyncIterator[Item]) -> AsyncGenerator[Item]:
    """The items that come before `seconds` from now have passed (None: all). Raises ProblemError then.

    Each wait is cut off by itself, so the items may be asked for from several tasks.
    """
    deadline = None if seconds is None else asyncio.get_running_loop().time() + seconds
    while True:
        limit = asyncio.timeout_at(deadline)
        try:
            async with limit:
                item = await anext(items)
        except StopAsyncIteration:
            return
        except TimeoutError:
            if seconds is not None and limit.expired():
                raise out_of_time(seconds) from None
            raise
        yield item
