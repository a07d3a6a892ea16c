"""The driver's end of the step connections to the ranks of a group."""

import selectors
import socket
import time
from collections import deque
from collections.abc import Mapping, Sequence

from raysonar.errors import EngineFailedError, RankLostError
from raysonar.ranks.frames import Kind, receive_frame, send_frame

FRAME_TIMEOUT_S = 30.0
"""How long the rest of a frame may take once it has begun, and how long a rank may refuse to take a plan."""
_CAUSE_S = 0.25
"""How long to look for a rank that is gone, when another one says that it has failed."""


class StepConnections:
    """Plans go to every rank of a data-parallel row, results come from the row's first."""

    def __init__(self, connections: Mapping[int, socket.socket], leaders: Sequence[int]) -> None:
        """connections: by rank; leaders: the first rank of each data-parallel row."""
        self._connections, self._leaders = connections, leaders
        self._results: dict[int, deque[bytes]] = {rank: deque() for rank in leaders}
        self._selector = selectors.DefaultSelector()
        for rank, connection in connections.items():
            connection.settimeout(FRAME_TIMEOUT_S)
            self._selector.register(connection, selectors.EVENT_READ, rank)

    def send(self, plans: Sequence[bytes]) -> None:
        """Queue a step: a packed StepPlan for each data-parallel row."""
        tensor = len(self._connections) // len(self._leaders)
        for rank, connection in self._connections.items():
            try:
                send_frame(connection, Kind.STEP, plans[rank // tensor])
            except OSError as error:
                words = self._last_words(rank)
                raise (EngineFailedError(words) if words else _lost(rank, error)) from None

    def receive(self, timeout: float) -> list[bytes]:
        """The oldest outstanding step's packed StepResults. Raises TimeoutError, EngineFailedError."""
        deadline = time.monotonic() + timeout
        while not all(self._results.values()):
            ready = self._selector.select(max(deadline - time.monotonic(), 0.0))
            if not ready:
                raise TimeoutError(f"the step brought no result within {timeout} s")
            for key, _ in ready:
                self._take(key.data)
        return [self._results[rank].popleft() for rank in self._leaders]

    def check(self) -> None:
        """Raises EngineFailedError when a rank has said that it failed, or is gone."""
        for key, _ in self._selector.select(0.0):
            self._take(key.data)

    def close(self) -> None:
        """Hang up; may be called again."""
        self._selector.close()
        for connection in self._connections.values():
            connection.close()

    def _take(self, rank: int) -> None:
        try:
            kind, payload = receive_frame(self._connections[rank])
        except OSError as error:
            raise _lost(rank, error) from None
        if kind is not Kind.STEP:
            raise self._lost_meanwhile(rank) or EngineFailedError(payload.decode())
        self._results[rank].append(payload)

    def _lost_meanwhile(self, failed: int) -> RankLostError | None:
        """A rank that is gone, where another one has failed: its end is the cause of what the other says.

        The other one's word may come first.
        """
        deadline = time.monotonic() + _CAUSE_S
        others = {rank: connection for rank, connection in self._connections.items() if rank != failed}
        while others and (left := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.data not in others:
                    self._selector.unregister(key.fileobj)
                    continue
                try:
                    kind, _ = receive_frame(others[key.data])
                except OSError as error:
                    return _lost(key.data, error)
                if kind is not Kind.STEP:
                    del others[key.data]
        return None

    def _last_words(self, rank: int) -> str | None:
        """What a rank that has closed its connection said at last."""
        try:
            while (frame := receive_frame(self._connections[rank]))[0] is not Kind.FAILURE:
                pass
        except OSError:
            return None
        return frame[1].decode()


def _lost(rank: int, error: OSError) -> RankLostError:
    return RankLostError(f"rank {rank} is gone: {error}")
