"""Who asks the driver: ingress replicas, and how the driver notices that one is gone."""

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import ray

WATCH_S = 2.0
"""How often the driver looks whether those who ask are there. Ray does not tell it: a stream that nobody reads any more
goes on to its end."""

_NAMESPACE = "serve"
"""Of all replicas."""

logger = logging.getLogger("ray.serve")


@dataclass(frozen=True)
class Sender:
    """A replica, by the name of its actor."""

    name: str

    @classmethod
    def here(cls) -> "Sender | None":
        """The actor of this process; None outside of one."""
        name = ray.get_runtime_context().get_actor_name() if ray.is_initialized() else None
        return cls(name) if name else None

    def is_gone(self) -> bool:
        """Whether Ray knows no such actor any more; as long as Ray does not answer, it may be there."""
        try:
            ray.get_actor(self.name, _NAMESPACE)
        except ValueError:
            return True
        except Exception:
            logger.exception("Cannot find out whether %s is there", self.name)
        return False


class Senders:
    """Watches the senders of open streams, while there are any."""

    def __init__(self) -> None:
        self._open: defaultdict[Sender, list[Callable[[], None]]] = defaultdict(list)
        self._watch: asyncio.Task[None] | None = None

    @contextmanager
    def watched(self, sender: Sender | None, gone: Callable[[], None]) -> Iterator[None]:
        """Call `gone` when the sender is gone before the block ends."""
        if sender is None:
            yield
            return
        self._open[sender].append(gone)
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._look())
        try:
            yield
        finally:
            self._open[sender].remove(gone)
            if not self._open[sender]:
                del self._open[sender]

    async def _look(self) -> None:
        while self._open:
            await asyncio.sleep(WATCH_S)
            for sender in list(self._open):
                if await asyncio.to_thread(sender.is_gone):
                    streams = list(self._open.get(sender, ()))
                    logger.warning("%s is gone: its %d streams are stopped", sender.name, len(streams))
                    for gone in streams:
                        gone()
