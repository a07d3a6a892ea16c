"""What a job has done, durably: a folder beside the output that a job which is started again goes on from.

The rows of the input are taken in ranges of ROWS_A_PART; the finished rows of a range are in one part. So a job holds
in memory only which rows of the ranges at hand are done, and the output is put together part by part.
"""

import fcntl
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from raysonar.batch.outcome import Outcome
from raysonar.batch.parts import pack, parts_in, replacing
from raysonar.batch.place import Place
from raysonar.batch.rows import Row
from raysonar.batch.writing import write_output
from raysonar.errors import ConfigurationError, RaysonarError

ROWS_A_PART = 1024
_HEADER = "header.json"


class LedgerError(RaysonarError, OSError):
    """A ledger that does not hold what was written to it."""


class Ledger:
    """One job's. A row is done when its line is in its part."""

    def __init__(
        self, output: Place, fingerprint: Mapping[str, Any], *, restart: bool = False, rows_a_part: int = ROWS_A_PART
    ) -> None:
        """Open the ledger of `output`, or begin one. `fingerprint`: which job it is, in plain data, two levels deep.

        Raises ConfigurationError when the output is another job's (unless `restart`, which forgets that), or when
        another process is at this one.
        """
        self._output = output
        self._rows_a_part = rows_a_part
        self._folder = output.beside(".ledger")
        self._fingerprint = json.loads(json.dumps({**fingerprint, "rows_a_part": rows_a_part}))
        if (local := self._folder.local) is not None:
            local.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self._folder)
        self._parts = parts_in(self._folder)
        self._guard = threading.RLock()
        """Over all that follows: rows are read in one thread and finished in another."""
        self._done: dict[int, set[int]] = {}
        """Of the parts at hand: the rows that are done."""
        self._waiting: dict[int, int] = {}
        """Of the parts at hand: rows that are handed out and not done."""
        self._left: set[int] = set()
        """Parts at hand whose rows have all been handed out."""
        try:
            self.complete: dict[str, int] | None = self._open(restart)
        except BaseException:
            self.release()
            raise

    def _open(self, restart: bool) -> dict[str, int] | None:
        """Rows and failed rows of a job that has ended, else None."""
        header = self._folder.inside(_HEADER)
        known = json.loads(header.read()) if header.exists and not restart else None
        if known is None:
            if self._output.exists and not restart:
                raise ConfigurationError(
                    f"{self._output} is there already, from no batch job; --restart replaces it, or give another output"
                )
        elif other := _difference(known["job"], self._fingerprint):
            raise ConfigurationError(
                f"{self._output} belongs to another job ({other}); --restart forgets that one, or give another output"
            )
        elif known["complete"] is None:
            return None
        elif self._output.exists:
            return dict(known["complete"])
        self._parts.remove()  # before the header says whose parts these are
        self._write_header(None)
        return None

    def _write_header(self, complete: Mapping[str, int] | None) -> None:
        data = json.dumps({"job": self._fingerprint, "complete": complete}, indent=1).encode()
        header = self._folder.inside(_HEADER)
        local = header.local
        if local is None:
            header.files.pipe_file(header.path, data)
        else:
            with replacing(local, local.with_name(_HEADER + ".new")) as file:
                file.write(data)

    def pending(self, rows: Iterable[Row], done: list[int]) -> Iterator[Row]:
        """Those rows that are not done; counts the others in `done[0]`. Each must be given to `add` some time."""
        part, skip = -1, set[int]()
        for row in rows:
            if row.index // self._rows_a_part != part:
                self._leave(part)
                part = row.index // self._rows_a_part
                skip = self._enter(part)
            if row.index in skip:
                done[0] += 1
                continue
            with self._guard:
                self._waiting[part] += 1
            yield row
        self._leave(part)

    def _enter(self, part: int) -> set[int]:
        """Begin with a part; returns its rows that are done."""
        skip = {outcome.index for outcome in self._parts.load(part)}
        with self._guard:
            self._done[part], self._waiting[part] = set(skip), 0
        return skip

    def _leave(self, part: int) -> None:
        with self._guard:
            if part in self._done:
                self._left.add(part)
                self._close_if_done(part)

    def _close_if_done(self, part: int) -> None:
        if part in self._left and not self._waiting[part]:
            self._left.discard(part)
            del self._done[part], self._waiting[part]
            self._parts.close(part)

    def add(self, outcomes: Iterable[Outcome]) -> list[Outcome]:
        """Append finished rows; returns those that had not been finished before."""
        fresh = []
        with self._guard:
            for outcome in outcomes:
                part = outcome.index // self._rows_a_part
                if part not in self._done or outcome.index in self._done[part]:
                    continue
                fresh.append(outcome)
                self._parts.add(part, pack(outcome))
                self._done[part].add(outcome.index)
                self._waiting[part] -= 1
                self._close_if_done(part)
        return fresh

    def sync(self) -> None:
        """Make durable what was added; may run in another thread."""
        self._parts.sync()

    def finish(self, rows: int, *, ordered: bool) -> dict[str, int]:
        """Put the output together from all `rows`, in the input's order if `ordered`; returns the header's counts."""
        self.sync()
        failed = 0

        def outcomes() -> Iterator[Outcome]:
            nonlocal failed
            for part in range(-(-rows // self._rows_a_part)):
                found = self._parts.load(part)
                want = min(self._rows_a_part, rows - part * self._rows_a_part)
                if len(found) != want:  # somebody else has been at the folder
                    raise LedgerError(f"{self._folder}: part {part} has {len(found)} rows, not {want}; start again")
                failed += sum(outcome.failed for outcome in found)
                yield from sorted(found, key=lambda outcome: outcome.index) if ordered else found

        write_output(self._output, self._folder, outcomes())
        self.complete = {"rows": rows, "failed": failed}
        self._write_header(self.complete)
        self._parts.remove()
        return self.complete

    def release(self) -> None:
        """Let another process have it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _lock(folder: Place) -> int | None:
    """A lock on a local folder, held until it is closed or the process ends; object stores have none."""
    local = folder.local
    if local is None:
        return None
    descriptor = os.open(local / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        raise ConfigurationError(f"another process is at this job: it holds {local / 'lock'}") from error
    return descriptor


def _difference(known: Mapping[str, Any], asked: Mapping[str, Any]) -> str | None:
    """The first value that two fingerprints do not share, in words."""
    for section in sorted({*known, *asked}):
        old, new = known.get(section), asked.get(section)
        if old == new:
            continue
        if isinstance(old, dict) and isinstance(new, dict):
            name = next(each for each in sorted({*old, *new}) if old.get(each) != new.get(each))
            return f"{section}, {name}: {old.get(name)!r} there, {new.get(name)!r} here"
        return f"{section}: {old!r} there, {new!r} here"
    return None
