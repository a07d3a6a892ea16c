"""The output: OpenAI's batch rows as JSON lines, or the same as a Parquet table."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from raysonar.batch.outcome import Outcome
from raysonar.batch.parts import replacing
from raysonar.batch.place import Place
from raysonar.errors import ConfigurationError

_TABLE_ROWS = 1024


def check_output(output: Place) -> None:
    """Raises ConfigurationError for an output that could not be written in the end."""
    if output.path.endswith(".parquet"):
        _pyarrow()


def write_output(output: Place, folder: Place, outcomes: Iterator[Outcome]) -> None:
    """Write all `outcomes`, so that the output appears whole or not at all; `folder` takes it until then."""
    write = _write_table if output.path.endswith(".parquet") else _write_lines
    if output.local is None:
        with output.files.open(output.path, "wb") as file:  # an object appears when it is closed
            write(file, outcomes)
        return
    with replacing(output.local, Path(folder.inside("output.new").path)) as file:
        write(file, outcomes)


def _write_lines(file: Any, outcomes: Iterator[Outcome]) -> None:
    for outcome in outcomes:
        file.write(outcome.line + b"\n")


def _pyarrow() -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigurationError("Parquet needs pyarrow: install raysonar[batch]") from error
    return pyarrow


def _write_table(file: Any, outcomes: Iterator[Outcome]) -> None:
    """One row a line: the first choice's text and the usage as columns, the whole answer as JSON."""
    arrow = _pyarrow()
    text, number = arrow.string(), arrow.int64()
    schema = arrow.schema(
        [
            ("custom_id", text),
            ("status_code", number),
            ("text", text),
            ("finish_reason", text),
            ("prompt_tokens", number),
            ("completion_tokens", number),
            ("response", text),
            ("error", text),
        ]
    )
    with arrow.parquet.ParquetWriter(file, schema) as writer:
        while rows := [_record(outcome) for outcome in islice(outcomes, _TABLE_ROWS)]:
            writer.write_table(arrow.Table.from_pylist(rows, schema))


def _record(outcome: Outcome) -> dict[str, Any]:
    line = json.loads(outcome.line)
    body = (line["response"] or {}).get("body") or {}
    choice = (body.get("choices") or [{}])[0]
    usage = body.get("usage") or {}
    return {
        "custom_id": line["custom_id"],
        "status_code": outcome.status or None,
        "text": choice["message"].get("content") if "message" in choice else choice.get("text"),
        "finish_reason": choice.get("finish_reason"),
        "prompt_tokens": usage.get("prompt_tokens"),
        "completion_tokens": usage.get("completion_tokens"),
        "response": json.dumps(body) if body else None,
        "error": None if line["error"] is None else line["error"]["message"],
    }
