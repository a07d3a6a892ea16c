"""The job: rows from the input to replicas, answers to the ledger, and in the end the output."""

import asyncio
import logging
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from raysonar.batch.answers import ReplicaError
from raysonar.batch.ledger import Ledger
from raysonar.batch.progress import Progress
from raysonar.batch.replicas import Replica
from raysonar.batch.rows import Row, Source
from raysonar.batch.supply import InputError, Supply
from raysonar.errors import RaysonarError

_LOSSES = 3
"""How often in a row a replica may be lost before it has answered anything."""
SYNC_S = 0.5
"""How often finished rows are made durable against the machine's death; the process's own death loses none."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Summary:
    """What a job has done in the end."""

    rows: int
    failed: int
    """Error rows."""


class Job:
    """One run of a job."""

    def __init__(
        self, source: Source, ledger: Ledger, replicas: Sequence[Replica], progress: Progress, *, ordered: bool
    ) -> None:
        """ordered: whether the output is in the input's order."""
        self._source, self._ledger, self._replicas = source, ledger, replicas
        self._progress, self._ordered = progress, ordered
        self._earlier = [0]
        self._supply = Supply(ledger.pending(source, self._earlier))
        self._up = len(replicas)

    def run(self) -> Summary:
        """Answer all rows that are not answered yet. What is done stays done whatever ends this.

        Raises RaysonarError when the rows cannot be answered, KeyboardInterrupt on SIGINT and SIGTERM.
        """
        return asyncio.run(self._run())

    async def _run(self) -> Summary:
        task = asyncio.current_task()
        assert task is not None
        terminated = asyncio.Event()

        def terminate() -> None:
            if not terminated.is_set():  # once: a second one would cut the end short
                terminated.set()
                task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
        try:
            async with asyncio.TaskGroup() as group:
                syncing = group.create_task(self._sync())
                feeds = [group.create_task(self._feed(replica)) for replica in self._replicas]
                await asyncio.gather(*feeds)
                syncing.cancel()
        except ExceptionGroup as errors:
            raise _first(errors) from errors
        except asyncio.CancelledError:
            if terminated.is_set():
                raise KeyboardInterrupt from None
            raise
        finally:
            await asyncio.gather(*(replica.close() for replica in self._replicas), return_exceptions=True)
            self._ledger.sync()
        self._progress.end()
        rows = self._earlier[0] + self._progress.rows
        counts = await asyncio.to_thread(self._ledger.finish, rows, ordered=self._ordered)
        return Summary(**counts)

    async def _feed(self, replica: Replica) -> None:
        """Keep a replica full until all rows are done; start it again when it is lost."""
        losses = 0
        while await self._supply.more():
            held: dict[int, Row] = {}
            before = self._progress.rows
            try:
                await self._serve(replica, held)
            except InputError:
                raise
            except RaysonarError as error:
                await replica.close()
                await self._supply.give_back([*held.values()])
                losses = 1 if self._progress.rows > before else losses + 1
                if isinstance(error, ReplicaError) and losses <= _LOSSES:
                    logger.warning("%s; starting again", error)
                    continue
                if self._up == 1:
                    raise
                self._up -= 1
                logger.warning("going on without this replica: %s", error)
                return

    async def _serve(self, replica: Replica, held: dict[int, Row]) -> None:
        """Start a replica and keep it full; `held` are the rows that it has."""
        window = await replica.start()
        while True:
            fresh = await self._supply.take(window - len(held), wait=not held)
            held.update((row.index, row) for row in fresh)
            if not held:
                return
            self._progress.begin(self._earlier[0])
            outcomes = await replica.exchange(fresh)
            self._progress.add(self._ledger.add(outcomes))
            for outcome in outcomes:
                del held[outcome.index]
            await self._supply.done(len(outcomes))

    async def _sync(self) -> None:
        while True:
            await asyncio.sleep(SYNC_S)
            await asyncio.to_thread(self._ledger.sync)


def _first(errors: ExceptionGroup[Exception]) -> Exception:
    """The error that ended the others."""
    error = errors.exceptions[0]
    return _first(error) if isinstance(error, ExceptionGroup) else error
