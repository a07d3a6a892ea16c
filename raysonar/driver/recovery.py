"""What follows when ranks fail: they are started again, so many times, and a request that makes them fail is found."""

import gc
import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace

from raysonar.config import RecoveryConfig
from raysonar.driver.request import Answer
from raysonar.errors import EngineFailedError, RankLostError
from raysonar.ranks.channel import RankInfo, StepChannel

logger = logging.getLogger(__name__)

PROVEN_TOKENS = 16
"""An answer that has gained so many tokens since a failure has not caused it."""
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 30.0


class Recovery:
    """Starts failed ranks again; too many failures within a time end the engine.

    Attributes:
        info: what the ranks that run now are.
    """

    def __init__(self, channel: StepChannel, info: RankInfo, config: RecoveryConfig) -> None:
        self.info = info
        self._channel, self._config = channel, config
        self._failures: deque[float] = deque()
        """When the ranks failed, within the window."""

    def restart(self, failure: Exception, pause: Callable[[float], bool]) -> None:
        """Start the ranks again, at once after a first failure, later and later after the next ones.

        pause: waits for so many seconds; True when the engine is being closed. Each failure is logged once, here; the
        one that ends the engine is raised instead: when the ranks failed too often, or could not be started.
        """
        following: Exception | None = failure
        while following is not None:
            number = self._count()
            if number > self._config.restarts:
                raise following
            self._log(following, number)
            _let_go(following)
            if pause(min(_FIRST_PAUSE_S * 2 ** (number - 2), _LONGEST_PAUSE_S) if number > 1 else 0.0):
                return
            began = time.monotonic()
            following = self._start()
            if following is None:
                logger.warning("the ranks are up again, after %.1f s", time.monotonic() - began)
            elif pause(0.0):
                return  # what ended the start was the close

    def _log(self, failure: Exception, number: int) -> None:
        """A rank that is gone is named; the traceback of who noticed that would tell nothing more."""
        lost = isinstance(failure, RankLostError)
        cause = failure if lost else root_cause(failure)
        logger.warning(
            "the ranks have failed (%s) and are started again (%d of %d times within %.0f s)",
            *(_last_line(cause), number, self._config.restarts, self._config.window_s),
            exc_info=None if lost else cause,
        )

    def _count(self) -> int:
        """Failures within the window, with the one just now."""
        now = time.monotonic()
        self._failures.append(now)
        while self._failures[0] < now - self._config.window_s:
            self._failures.popleft()
        return len(self._failures)

    def _start(self) -> Exception | None:
        try:
            info = self._channel.restart()
        except Exception as error:
            return error
        if replace(info, processes=()) != replace(self.info, processes=()):
            return EngineFailedError(f"the ranks are not what they were: {self.info} before, {info} now")
        self.info = info
        return None


class Suspicion:
    """Remembers who ran when the ranks failed, and how they failed."""

    def __init__(self) -> None:
        self._how: str | None = None
        self._before: dict[Answer, int] = {}

    def suspects(self, failure: BaseException, running: Mapping[Answer, int]) -> list[Answer]:
        """Of the answers that run at a failure, each with the tokens it has given out, those that may have caused it.

        They are the ones that ran at the failure before, too, when that was the same one, and have hardly come further
        since. None at a first failure, and none when a process was lost: most failures are not a request's fault.
        """
        how = None if isinstance(failure, RankLostError) else _last_line(failure)
        before = self._before if how == self._how else {}
        self._how, self._before = how, {} if how is None else dict(running)
        return [
            answer for answer, tokens in running.items() if answer in before and tokens < before[answer] + PROVEN_TOKENS
        ]


def root_cause(error: BaseException) -> BaseException:
    """What is behind the error that says that the engine failed."""
    return error.__cause__ if isinstance(error, EngineFailedError) and error.__cause__ else error


def _last_line(error: BaseException) -> str:
    """Its kind and message; of an error that quotes a traceback, what stands at the end."""
    return f"{type(error).__name__}: {error}".splitlines()[-1]


def _let_go(error: BaseException) -> None:
    """Free what the frames of an error's traceback hold: tensors of the rank that failed."""
    chain: BaseException | None = error
    while chain is not None:
        traceback.clear_frames(chain.__traceback__)
        chain = chain.__cause__ or chain.__context__
    gc.collect()
