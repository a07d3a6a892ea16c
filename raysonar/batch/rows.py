"""The input: rows of OpenAI's batch files, or prompts, from JSON lines, Parquet or text. Read as a stream."""

import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from raysonar.batch.place import Place
from raysonar.driver.params import CONTINUATION
from raysonar.errors import ConfigurationError, RaysonarError

Format = Literal["jsonl", "parquet", "text"]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"

_ENDINGS: Mapping[str, Format] = {
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "json": "jsonl",
    "parquet": "parquet",
    "txt": "text",
    "text": "text",
}
_COMPRESSIONS = {"gz": "gzip", "bz2": "bz2", "xz": "xz", "zst": "zstd"}
_LONGEST_LINE = 32 << 20
"""Bytes; what a request may have."""
_PARQUET_ROWS = 256
"""That are in memory at once."""
_CHUNK = 1 << 20


class RowError(RaysonarError, ValueError):
    """A row that asks for nothing that could be answered."""


@dataclass(frozen=True)
class Row:
    """One row of the input, not looked into yet."""

    index: int
    content: bytes | dict[str, Any]
    """A line of JSON, or a record."""


@dataclass(frozen=True)
class Request:
    """What a row asks for."""

    custom_id: str
    url: str
    body: dict[str, Any]


@dataclass(frozen=True)
class Asking:
    """How rows become requests."""

    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Parameters of rows that do not give them."""
    chat: bool | None = None
    """Whether a prompt is a user's message; None: when the model has a chat template."""


def format_of(name: str) -> Format:
    """By the name's ending. Raises ConfigurationError when it says nothing."""
    parts = name.lower().rsplit("/", 1)[-1].split(".")
    ending = parts[-2] if parts[-1] in _COMPRESSIONS and len(parts) > 2 else parts[-1]
    if ending not in _ENDINGS:
        known = ", ".join(f".{each}" for each in _ENDINGS)
        raise ConfigurationError(f"what is in {name}? Its name ends in none of {known}; say it with --format")
    return _ENDINGS[ending]


class Source:
    """The input's rows."""

    def __init__(self, place: Place, form: Format) -> None:
        self._place, self._form = place, form
        self._read = 0
        self._size = 1
        self.fraction = 0.0
        """How much has been read, from 0 to 1."""

    def fingerprint(self) -> dict[str, Any]:
        """What tells this input from another: its size and its contents' digest, or the object store's own mark."""
        files, path = self._place.files, self._place.path
        if self._place.local is None:
            return {"bytes": files.info(path)["size"], "mark": str(files.ukey(path))}
        digest, size = hashlib.blake2b(digest_size=16), 0
        with files.open(path, "rb") as file:
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
                size += len(chunk)
        return {"bytes": size, "mark": digest.hexdigest()}

    def __iter__(self) -> Iterator[Row]:
        contents = self._parquet() if self._form == "parquet" else self._lines()
        for index, content in enumerate(contents):
            yield Row(index, content)
        self.fraction = 1.0

    def _lines(self) -> Iterator[bytes | dict[str, Any]]:
        """One a line that is not blank. Of a line that is too long only the beginning, which is no JSON."""
        files, path = self._place.files, self._place.path
        size = max(files.info(path)["size"], 1)
        compression = _COMPRESSIONS.get(path.rpartition(".")[2].lower())
        with files.open(path, "rb") as raw, _decompressed(raw, compression) as file:
            first = True
            while line := file.readline(_LONGEST_LINE):
                if first:
                    line, first = line.removeprefix(b"\xef\xbb\xbf"), False
                rest = line
                while len(rest) == _LONGEST_LINE and not rest.endswith(b"\n"):
                    rest = file.readline(_LONGEST_LINE)
                self.fraction = raw.tell() / size
                if line.strip():
                    yield line if self._form == "jsonl" else {"prompt": line.rstrip(b"\r\n").decode("utf-8", "replace")}

    def _parquet(self) -> Iterator[dict[str, Any]]:
        try:
            import pyarrow.parquet as parquet
        except ImportError as error:
            raise ConfigurationError("Parquet needs pyarrow: install raysonar[batch]") from error
        with self._place.files.open(self._place.path, "rb") as raw:
            file = parquet.ParquetFile(raw)
            names = set(file.schema_arrow.names)
            if not names & {"body", "messages", "prompt"}:
                columns = ", ".join(sorted(names))
                raise ConfigurationError(f"{self._place} has no column body, messages or prompt, only {columns}")
            total, read = max(file.metadata.num_rows, 1), 0
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for record in batch.to_pylist():
                    read += 1
                    self.fraction = read / total
                    yield {name: value for name, value in record.items() if value is not None}


def _decompressed(raw: Any, compression: str | None) -> Any:
    from fsspec.compression import compr

    return io.BufferedReader(raw if compression is None else compr[compression](raw, mode="rb"))


def request_of(row: Row, asking: Asking, *, chat: bool) -> Request:
    """What a row asks for; `chat` is whether a prompt is a user's message. Raises RowError."""
    record = _record(row.content)
    fallback = f"row-{row.index}"
    if "body" in record:
        return _openai(record, fallback, asking)
    custom_id = str(record.pop("custom_id", fallback))
    if "messages" in record:
        return Request(custom_id, CHAT, {"temperature": 0.0, **asking.defaults, **record})
    if "prompt" not in record:
        keys = ", ".join(record) or "nothing"
        raise RowError(f"a row has custom_id, method, url and body, or messages, or prompt; this one has {keys}")
    body = {"temperature": 0.0, **asking.defaults, **record}
    if chat and isinstance(record["prompt"], str):
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        return Request(custom_id, CHAT, body)
    return Request(custom_id, COMPLETIONS, {"max_tokens": CONTINUATION, **body})


def custom_id_of(row: Row) -> str:
    """The id of a row that may be anything."""
    try:
        return str(_record(row.content).get("custom_id", f"row-{row.index}"))
    except RowError:
        return f"row-{row.index}"


def _record(content: bytes | dict[str, Any]) -> dict[str, Any]:
    if isinstance(content, dict):
        return dict(content)
    if len(content) >= _LONGEST_LINE:
        raise RowError(f"the line is longer than {_LONGEST_LINE} bytes")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise RowError(f"the line is not JSON: {error}") from error
    if isinstance(value, str):
        return {"prompt": value}
    if not isinstance(value, dict):
        raise RowError(f"a row is an object or a string, not {type(value).__name__}")
    return value


def _openai(record: dict[str, Any], fallback: str, asking: Asking) -> Request:
    body, url, method = record["body"], record.get("url", CHAT), record.get("method", "POST")
    if isinstance(body, str):  # as Parquet files have it
        try:
            body = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise RowError(f"body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RowError(f"body must be an object, not {type(body).__name__}")
    if method != "POST":
        raise RowError(f"method must be POST, not {method!r}")
    if url not in (CHAT, COMPLETIONS):
        raise RowError(f"url must be {CHAT} or {COMPLETIONS}, not {url!r}")
    if unknown := sorted(record.keys() - {"custom_id", "method", "url", "body"}):
        raise RowError(f"a row has custom_id, method, url and body; {', '.join(unknown)} is unknown")
    return Request(str(record.get("custom_id", fallback)), url, {**asking.defaults, **body})
