"""The progress line on standard error."""

import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import TextIO

from raysonar.batch.outcome import Outcome

_TERMINAL_S = 0.5
_LOG_S = 10.0


class Progress:
    """Counts outcomes and shows how far the job is: one line that changes on a terminal, else a line now and then."""

    def __init__(
        self,
        fraction: Callable[[], float],
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`fraction` says how much of the input has been read, from 0 to 1."""
        self._fraction, self._clock = fraction, clock
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream is not None and self._stream.isatty()
        self._began: float | None = None
        self._before = 0.0
        """The fraction that an earlier run had done."""
        self._shown = clock()
        self.rows = self.failed = self.tokens = self._drafted = self._accepted = 0
        self.earlier = 0
        """Rows that an earlier run had done."""

    def begin(self, earlier: int) -> None:
        """Rows are handed out; an earlier run had done `earlier` rows, and all that was read before the first."""
        self.earlier = earlier
        if self._began is None:
            self._began, self._before = self._clock(), self._fraction()

    def add(self, outcomes: list[Outcome]) -> None:
        """Count, and show when it is time."""
        for outcome in outcomes:
            self.rows += 1
            self.failed += outcome.failed
            self.tokens += outcome.tokens
            self._drafted += outcome.drafted
            self._accepted += outcome.accepted
        if self._clock() - self._shown >= (_TERMINAL_S if self._terminal else _LOG_S):
            self.show()

    def show(self) -> None:
        """Print the line."""
        self._shown = self._clock()
        if self._stream is not None:
            text = self.text()
            print(f"\r\x1b[K{text}" if self._terminal else text, end="" if self._terminal else "\n", file=self._stream)
            self._stream.flush()

    def end(self) -> None:
        """The last line, for good."""
        self.show()
        if self._terminal and self._stream is not None:
            print(file=self._stream, flush=True)

    def text(self) -> str:
        """Rows so far, rates since this run's first row, acceptance, and the time that is left."""
        seconds = 0.0 if self._began is None else self._clock() - self._began
        per_second = 1 / seconds if seconds else 0.0
        parts = [f"{self.rows} rows" + (f" (and {self.earlier} before)" if self.earlier else "")]
        if self.failed:
            parts.append(f"{self.failed} failed")
        parts.append(f"{self.rows * per_second:.1f} rows/s, {self.tokens * per_second:.0f} tokens/s")
        if self._drafted:
            parts.append(f"{self._accepted / self._drafted:.0%} of drafts accepted")
        now = self._fraction()
        if self._before < now < 1 and seconds:
            left = seconds * (1 - now) / (now - self._before)
            parts.append(f"{now:.0%} read, about {timedelta(seconds=round(left))} left")
        return "[" + "; ".join(parts) + "]"
