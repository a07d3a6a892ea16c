"""Where files are: a local path or a URL of an object store, through fsspec."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from raysonar.errors import ConfigurationError


@dataclass(frozen=True)
class Place:
    """A file or a folder of a file system."""

    files: Any
    """fsspec's AbstractFileSystem."""
    path: str

    @classmethod
    def of(cls, name: str) -> "Place":
        """Raises ConfigurationError for a store that cannot be reached from here."""
        try:
            files, path = fsspec.core.url_to_fs(name)
        except (ValueError, ImportError) as error:
            raise ConfigurationError(f"cannot reach {name}: {error}") from error
        return cls(files, str(path))

    @property
    def local(self) -> Path | None:
        """The path on this machine's disks, or None for an object store."""
        return Path(self.path) if "file" in _protocols(self.files) else None

    def beside(self, suffix: str) -> "Place":
        """The place of the same name with `suffix`."""
        return Place(self.files, self.path + suffix)

    def inside(self, name: str) -> "Place":
        """A file of this folder."""
        return Place(self.files, f"{self.path}/{name}")

    @property
    def exists(self) -> bool:
        """Asked anew, past fsspec's cache of listings."""
        self.files.invalidate_cache()
        return bool(self.files.exists(self.path))

    def read(self) -> bytes:
        """All of it."""
        return bytes(self.files.cat_file(self.path))

    def names(self) -> list[str]:
        """Of the files in this folder, sorted; none when it is not there."""
        self.files.invalidate_cache()
        try:
            paths = self.files.ls(self.path, detail=False)
        except FileNotFoundError:
            return []
        return sorted(str(path).rstrip("/").rpartition("/")[2] for path in paths)

    def __str__(self) -> str:
        return self.path if self.local else str(self.files.unstrip_protocol(self.path))


def _protocols(files: Any) -> tuple[str, ...]:
    return (files.protocol,) if isinstance(files.protocol, str) else tuple(files.protocol)
