"""What became of a row: a line of OpenAI's batch output, and the figures for the progress line."""

import json
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from raysonar.batch.rows import Row, custom_id_of


@dataclass(frozen=True)
class Outcome:
    """A finished row."""

    index: int
    status: int
    """HTTP's; 0 for a row that asked for nothing."""
    line: bytes
    """Of the output, without its line feed."""
    tokens: int = 0
    """Generated."""
    drafted: int = 0
    accepted: int = 0

    @property
    def failed(self) -> bool:
        """Whether it is an error row."""
        return self.status != 200


def answered(row: Row, custom_id: str, status: int, body: Mapping[str, Any]) -> Outcome:
    """A row to which a server's answer is `body`, with HTTP's `status`."""
    error = None
    if status != 200:
        given = body.get("error")
        given = given if isinstance(given, Mapping) else {}
        error = {"code": given.get("code") or str(status), "message": given.get("message") or f"HTTP status {status}"}
    usage = body.get("usage") or {}
    details = usage.get("completion_tokens_details") or {}
    accepted = details.get("accepted_prediction_tokens") or 0
    response = {"status_code": status, "request_id": str(body.get("id") or f"req-{uuid.uuid4().hex}"), "body": body}
    return Outcome(
        index=row.index,
        status=status,
        line=_line(custom_id, response, error),
        tokens=usage.get("completion_tokens") or 0,
        drafted=accepted + (details.get("rejected_prediction_tokens") or 0),
        accepted=accepted,
    )


def refused(row: Row, reason: str) -> Outcome:
    """A row that is no request."""
    return Outcome(row.index, 0, _line(custom_id_of(row), None, {"code": "invalid_row", "message": reason}))


def _line(custom_id: str, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> bytes:
    """ASCII, so that a line is a line to every reader."""
    values = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": error}
    return json.dumps(values, separators=(",", ":")).encode()
