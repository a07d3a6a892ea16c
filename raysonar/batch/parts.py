"""The ledger's parts: lines that are appended, made durable, and read back up to the first that is torn.

A part holds the finished rows of one range of the input. Lines are `index status checksum json`, in the order in which
rows finished.
"""

import os
import re
import threading
import uuid
import zlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol

from raysonar.batch.outcome import Outcome
from raysonar.batch.place import Place

_LINE = re.compile(rb"(\d+) (\d+) ([0-9a-f]{8}) (.*)\n", re.DOTALL)


def pack(outcome: Outcome) -> bytes:
    """A line of a part."""
    start = b"%d %d " % (outcome.index, outcome.status)
    return start + b"%08x " % zlib.crc32(outcome.line, zlib.crc32(start)) + outcome.line + b"\n"


def unpack(data: bytes) -> tuple[list[Outcome], int]:
    """The rows of a part's `data` up to the first line that is torn, and how many bytes they are."""
    outcomes, end = [], 0
    for raw in data.splitlines(keepends=True):
        found = _LINE.fullmatch(raw)
        if found is None:
            break
        index, status, checksum, line = found.groups()
        if zlib.crc32(line, zlib.crc32(b"%b %b " % (index, status))) != int(checksum, 16):
            break
        outcomes.append(Outcome(int(index), int(status), line))
        end += len(raw)
    return outcomes, end


class Parts(Protocol):
    """Where parts are kept."""

    def load(self, part: int) -> list[Outcome]:
        """The rows of a part, each once; drops what is torn. To be called before the part is added to."""
        ...

    def add(self, part: int, lines: bytes) -> None:
        """Append whole lines; the process may be killed after this, and they stay (local files only)."""
        ...

    def sync(self) -> None:
        """Make durable what was added; may be called from another thread than `add`."""
        ...

    def close(self, part: int) -> None:
        """Nothing more will be added to the part."""
        ...

    def remove(self) -> None:
        """Delete all parts."""
        ...


def parts_in(folder: Place) -> Parts:
    """The parts in a ledger's folder."""
    local = folder.local
    return ObjectParts(folder) if local is None else LocalParts(local)


class LocalParts:
    """A file a part, appended and fsynced."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._open: dict[int, int] = {}
        """File descriptors."""
        self._dirty: set[int] = set()
        self._lock = threading.Lock()

    def _file(self, part: int) -> Path:
        return self._folder / f"part-{part:08d}"

    def load(self, part: int) -> list[Outcome]:
        try:
            data = self._file(part).read_bytes()
        except FileNotFoundError:
            return []
        outcomes, end = unpack(data)
        if end < len(data):
            os.truncate(self._file(part), end)
        return _once(outcomes)

    def add(self, part: int, lines: bytes) -> None:
        with self._lock:
            if part not in self._open:
                new = not self._file(part).exists()
                self._open[part] = os.open(self._file(part), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
                if new:
                    sync_folder(self._folder)
            self._dirty.add(part)
            view = memoryview(lines)
            while view:
                view = view[os.write(self._open[part], view) :]

    def sync(self) -> None:
        with self._lock:
            copies = [os.dup(self._open[part]) for part in self._dirty]
            self._dirty.clear()
        for copy in copies:
            try:
                os.fsync(copy)
            finally:
                os.close(copy)

    def close(self, part: int) -> None:
        with self._lock:
            descriptor = self._open.pop(part, None)
            self._dirty.discard(part)
        if descriptor is not None:
            os.fsync(descriptor)
            os.close(descriptor)

    def remove(self) -> None:
        for part in [*self._open]:
            self.close(part)
        for file in self._folder.glob("part-*"):
            file.unlink()
        sync_folder(self._folder)


class ObjectParts:
    """Objects that each hold some lines of a part: a store that cannot append gets a new object with every sync."""

    def __init__(self, folder: Place) -> None:
        self._folder = folder
        self._added: defaultdict[int, list[bytes]] = defaultdict(list)
        self._lock = threading.Lock()
        self._names: list[str] | None = None
        self._run = uuid.uuid4().hex[:8]
        self._number = 0

    def _of(self, part: int) -> list[str]:
        if self._names is None:
            self._names = self._folder.names()
        return [name for name in self._names if name.startswith(f"part-{part:08d}.")]

    def load(self, part: int) -> list[Outcome]:
        outcomes = []
        for name in self._of(part):
            outcomes += unpack(self._folder.inside(name).read())[0]
        return _once(outcomes)

    def add(self, part: int, lines: bytes) -> None:
        with self._lock:
            self._added[part].append(lines)

    def sync(self) -> None:
        with self._lock:
            added, self._added = self._added, defaultdict(list)
        for part, lines in added.items():
            name = f"part-{part:08d}.{self._run}.{self._number:08d}"
            self._number += 1
            place = self._folder.inside(name)
            place.files.pipe_file(place.path, b"".join(lines))
            self._of(part)
            assert self._names is not None
            self._names.append(name)

    def close(self, part: int) -> None:
        """The next sync writes what is left."""

    def remove(self) -> None:
        for name in self._folder.names():
            if name.startswith("part-"):
                self._folder.files.rm_file(self._folder.inside(name).path)
        self._names = []


def _once(outcomes: list[Outcome]) -> list[Outcome]:
    """The first of each row."""
    return list({outcome.index: outcome for outcome in reversed(outcomes)}.values())[::-1]


def sync_folder(folder: Path) -> None:
    """Make a folder's entries durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path, fresh: Path) -> Iterator[BinaryIO]:
    """A file that replaces the one at `path`, durably and at once: a reader sees the old or the new one.

    It is at `fresh`, on the same file system, until all is written.
    """
    with fresh.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
    sync_folder(path.parent)
