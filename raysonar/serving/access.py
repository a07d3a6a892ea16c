"""Who may ask, how much at once, and how long a body: what is checked of a request before anything reads it."""

import asyncio
import hashlib
import hmac
import logging
import time
from collections import Counter
from pathlib import Path

from ray.exceptions import TaskCancelledError
from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from raysonar.config import LimitsConfig
from raysonar.errors import ConfigurationError
from raysonar.serving.problems import Problem, too_large, too_slow
from raysonar.serving.web import PAGE_PATHS

OPEN_PATHS = frozenset({"", "/health", "/ready", "/metrics"}) | PAGE_PATHS
"""Routes that need no key, as in vLLM: probes and scrapers have none, and they tell nothing of any request. The page is
open too; what it asks for is not."""
BODY_PAUSE_S = 60.0
"""A client that sends nothing of its body for so long has lost its turn."""
_LOOK_EVERY_S = 0.5
"""How often a request makes the keys' file be looked at for changes."""

logger = logging.getLogger("ray.serve")


class ApiKeys:
    """The keys in a file, as `keys_in` finds them.

    The file is read again when it has changed. While it cannot be read, the keys that were read last are good; of a
    file without keys, none is.
    """

    def __init__(self, file: Path) -> None:
        """Raises ConfigurationError: the file cannot be read, or holds no key."""
        self._file = file
        self._looked = time.monotonic()
        try:
            self._state = self._file_state()
            self._digests = _digests(file)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"api_keys_file: {file} cannot be read: {error}") from error
        if not self._digests:
            raise ConfigurationError(f"api_keys_file: {file} has no key; write one a line")

    def name_of(self, key: str) -> str | None:
        """What a valid key is called in logs and limits, 8 digits that do not give it away; None for any other.

        Takes the same time for every key of the file.
        """
        self._refresh()
        digest, found = hashlib.sha256(key.encode()).digest(), False
        for each in self._digests:
            found |= hmac.compare_digest(digest, each)
        return digest.hex()[:8] if found else None

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY_S:
            return
        self._looked = now
        try:
            state = self._file_state()
            if state != self._state:
                self._digests = _digests(self._file)
                self._state = state
                logger.warning("%s has changed: %d API keys", self._file, len(self._digests))
        except (OSError, UnicodeDecodeError) as error:
            logger.error("api_keys_file: %s cannot be read, so the keys read before stay: %s", self._file, error)

    def _file_state(self) -> tuple[int, int, int]:
        """Differs when the file, or the one that a link leads to, is another."""
        stat = self._file.stat()
        return stat.st_ino, stat.st_mtime_ns, stat.st_size


def keys_in(text: str) -> list[str]:
    """The keys in a file's text, one a line; empty lines and those that start with `#` are none."""
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _digests(file: Path) -> list[bytes]:
    """Keys are compared by their digests, so that their lengths and beginnings do not show in the time it takes."""
    return [hashlib.sha256(key.encode()).digest() for key in keys_in(file.read_text(encoding="utf-8"))]


class Access:
    """Lets requests through to the application inside it. Others get a 401, 413 or 429 in OpenAI's shape.

    `scope["state"]["api_key"]` is the name of a request's key, None where no keys are asked for.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None, limits: LimitsConfig) -> None:
        self._app, self._keys, self._limits = app, keys, limits
        self._ongoing: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI."""
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) in OPEN_PATHS:
            return await self._app(scope, receive, send)
        receive = _Limited(receive, self._limits.max_body_bytes)
        if self._keys is None:
            return await self._app(scope, receive, send)
        name = self._name(scope)
        if name is None:
            return await _refuse(_unauthorised(Headers(scope=scope)), scope, receive, send)
        most = self._limits.max_requests_per_key
        if most is not None and self._ongoing[name] >= most:
            return await _refuse(_too_many(most), scope, receive, send)
        scope.setdefault("state", {})["api_key"] = name
        self._ongoing[name] += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._ongoing[name] -= 1
            if not self._ongoing[name]:
                del self._ongoing[name]

    def _name(self, scope: Scope) -> str | None:
        assert self._keys is not None
        scheme, _, key = Headers(scope=scope).get("authorization", "").partition(" ")
        return self._keys.name_of(key.strip()) if scheme.lower() == "bearer" else None


class _Limited:
    """A request's body, read up to a limit; one that is longer is counted to its end, not held, and then refused.

    So its sender, who may not read before everything is sent, comes to the answer.
    """

    def __init__(self, receive: Receive, limit: int) -> None:
        self._receive, self._limit, self._size = receive, limit, 0
        self._whole = False

    async def __call__(self) -> Message:
        """ASGI's receive. Raises ProblemError."""
        message = await self._next()
        while message["type"] == "http.request":
            self._size += len(message.get("body", b""))
            if self._size <= self._limit:
                return message
            if self._whole:
                raise too_large(self._size, self._limit)
            message = await self._next()
        return message

    async def _next(self) -> Message:
        """The next message; after the body only a disconnect comes, for which there is no hurry."""
        try:
            async with asyncio.timeout(None if self._whole else BODY_PAUSE_S):
                message = await self._receive()
        except TimeoutError:
            raise too_slow(BODY_PAUSE_S) from None
        except TaskCancelledError:  # Serve's proxy has lost its client
            return {"type": "http.disconnect"}
        self._whole = not message.get("more_body", False)
        return message


async def _refuse(problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
    await JSONResponse(problem.body(), problem.status, headers=problem.headers)(scope, receive, send)


def _unauthorised(headers: Headers) -> Problem:
    given = "authorization" in headers
    message = "The API key is not valid" if given else "An API key is needed: send `Authorization: Bearer KEY`"
    return Problem(401, message, code="invalid_api_key")


def _too_many(most: int) -> Problem:
    message = f"{most} requests of this API key are being served, as many as it may have at once"
    return Problem(429, message, "rate_limit_error", code="rate_limit_exceeded")
