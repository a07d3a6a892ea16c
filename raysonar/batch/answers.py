"""How a row is answered: by a driver of our own or of a Serve application, or by an endpoint over HTTP."""

import asyncio
import itertools
import json
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import aiohttp

from raysonar.batch.outcome import Outcome, answered, refused
from raysonar.batch.rows import CHAT, COMPLETIONS, Asking, Request, Row, RowError, request_of
from raysonar.driver.outputs import Delta
from raysonar.errors import ConfigurationError, RaysonarError
from raysonar.serving.answering import Answering
from raysonar.serving.deadlines import within
from raysonar.serving.generation import Batch, Generation
from raysonar.serving.problems import Problem, ProblemError, model_not_found, problem_of
from raysonar.serving.protocol import ChatBody, CompletionBody, GenerationBody

PATIENCE_S = 300.0
"""How long a replica or endpoint may be unavailable, without an answer to any row, before it counts as failed."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_ATTEMPTS = 30
"""After so many, about five minutes, a row that is not answered while others are is at fault itself."""
_REQUEST_S = 3600.0
_CONNECT_S = 10.0
_BUSY = (429, 502, 503)
"""The same request may succeed later."""
_DENIED = (401, 403)
"""No row is at fault, and none would be answered."""

_BODIES: Mapping[str, type[GenerationBody]] = {CHAT: ChatBody, COMPLETIONS: CompletionBody}


class ReplicaError(RaysonarError, RuntimeError):
    """What answers rows has stopped to; rows that it had are not at fault."""


class Patience:
    """Waits between attempts, until nothing has been answered for too long."""

    def __init__(self, seconds: float = PATIENCE_S, attempts: int = _ATTEMPTS) -> None:
        """seconds: without any answer. attempts: at one row."""
        self._seconds, self._attempts = seconds, attempts
        self._last_answer = time.monotonic()

    def answered(self) -> None:
        """Something was."""
        self._last_answer = time.monotonic()

    async def wait(self, attempt: int, began: float, reason: str, seconds: float | None = None) -> bool:
        """Before the next attempt at a row that `began` then, for `seconds` if the server said so.

        Returns whether there should be one: not when others are answered and this row is not. Raises ReplicaError when
        none is answered.
        """
        if attempt >= self._attempts and self._last_answer > began:
            return False
        if time.monotonic() - self._last_answer > self._seconds:
            raise ReplicaError(f"nothing was answered for {self._seconds:.0f} s; at last: {reason}")
        pause = min(_FIRST_PAUSE_S * 2.0 ** min(attempt, 10), _LONGEST_PAUSE_S)
        await asyncio.sleep(pause if seconds is None else min(seconds, _LONGEST_PAUSE_S))
        return True


class DriverAnswers:
    """Answers rows through the driver deployment's own interface, as the ingress does."""

    def __init__(
        self,
        *,
        stream: Callable[[Generation], AsyncGenerator[Batch]],
        answering: Answering,
        check: Callable[[], Awaitable[None]],
        model: str,
        chat: bool,
        asking: Asking,
    ) -> None:
        """stream: the driver's. check: raises when the driver is lost for good. model: what rows call it. chat: whether
        prompts are messages."""
        self._stream, self._answering, self._check = stream, answering, check
        self._model, self._chat, self._asking = model, chat, asking
        self.patience = Patience()

    async def __call__(self, row: Row) -> Outcome:
        """Never raises for what is wrong with the row; ReplicaError, EngineFailedError when the driver is lost."""
        try:
            request = request_of(row, self._asking, chat=self._chat)
        except RowError as error:
            return refused(row, str(error))
        began = time.monotonic()
        for attempt in itertools.count(1):
            try:
                outcome = answered(row, request.custom_id, 200, await self._answer(request))
                break
            except Exception as error:
                problem = problem_of(error)
            outcome = answered(row, request.custom_id, problem.status, problem.body())
            if problem.status not in _BUSY:
                break
            await self._check()
            if not await self.patience.wait(attempt, began, problem.message):
                return outcome
        self.patience.answered()
        return outcome

    async def _answer(self, request: Request) -> Mapping[str, Any]:
        body = _BODIES[request.url].model_validate_json(_json({"model": self._model, **request.body}))
        if body.model != self._model:
            raise model_not_found(body.model, self._model)
        if body.stream:
            raise ProblemError(Problem(400, "a row of a batch cannot be streamed", param="stream"))
        answer, generation = await self._answering.begin(body)
        news: list[tuple[int, Delta]] = []
        async with aclosing(self._stream(generation)) as batches:
            async for batch in within(body.timeout, batches):
                if isinstance(batch, Problem):
                    raise ProblemError(batch)
                news += batch
        return answer.whole(news)


def _json(body: Mapping[str, Any]) -> str:
    try:
        return json.dumps(body)
    except (TypeError, ValueError, RecursionError) as error:  # a Parquet file may hold dates and the like
        raise ProblemError(Problem(400, f"the row has no JSON form: {error}")) from error


class EndpointAnswers:
    """Answers rows over HTTP, from any server with OpenAI's API."""

    def __init__(self, url: str, asking: Asking, *, concurrency: int, api_key: str | None = None) -> None:
        """url: up to and including /v1. concurrency: connections at the most."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._asking = asking
        self._concurrency = concurrency
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._session: aiohttp.ClientSession | None = None
        self._model = ""
        self.patience = Patience()

    async def start(self, model: str | None) -> None:
        """Connect; rows that name no model get `model`, or the endpoint's first. Raises ConfigurationError."""
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=_REQUEST_S, sock_connect=_CONNECT_S),
            connector=aiohttp.TCPConnector(limit=self._concurrency),
        )
        try:
            async with self._session.get(f"{self._url}/v1/models") as response:
                text = await response.text()
                if response.status != 200:
                    raise ConfigurationError(f"{self._url}/v1/models answers {response.status}: {text[:200]}")
                models = [each["id"] for each in json.loads(text)["data"]]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ConfigurationError(f"no server answers at {self._url}: {error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(f"{self._url}/v1/models does not answer as OpenAI's API does: {error}") from error
        if model is None and not models:
            raise ConfigurationError(f"{self._url} serves no model")
        self._model = model or models[0]

    async def __call__(self, row: Row) -> Outcome:
        """Never raises for what is wrong with the row; ReplicaError when the endpoint is lost, ConfigurationError when
        it lets nobody in."""
        try:
            request = request_of(row, self._asking, chat=self._asking.chat is not False)
            if request.body.get("stream"):
                raise RowError("a row of a batch cannot be streamed: leave stream out")
            data = _json({"model": self._model, **request.body}).encode()
        except RowError as error:
            return refused(row, str(error))
        except ProblemError as error:
            return refused(row, error.problem.message)
        began = time.monotonic()
        for attempt in itertools.count(1):
            status, body, retry_after = await self._post(request.url, data)
            if status in _DENIED:
                raise ConfigurationError(f"{self._url} answers {status}: {body.get('error')}")
            if status not in _BUSY:
                self.patience.answered()
                break
            if not await self.patience.wait(attempt, began, str(body.get("error")), retry_after):
                break
        return answered(row, request.custom_id, status, body)

    async def _post(self, path: str, data: bytes) -> tuple[int, dict[str, Any], float | None]:
        """Status, body, and for how many seconds to wait if the server says so. A lost connection is a 502; so is a
        route that was there at the start, and is not: the service is being replaced."""
        assert self._session is not None
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(self._url + path, data=data, headers=headers) as response:
                text = await response.text()
                wait = response.headers.get("Retry-After", "")
                status, body = _understood(response.status, text)
                return status, body, float(wait) if wait.isdigit() else None
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
            return 502, {"error": {"code": "no_answer", "message": f"{type(error).__name__}: {error}"}}, None

    async def close(self) -> None:
        """Hang up."""
        if self._session is not None:
            await self._session.close()


def _understood(status: int, text: str) -> tuple[int, dict[str, Any]]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if isinstance(value, dict):
        return status, value
    error = {"message": f"the server answered {status} without a JSON object: {text[:200]}"}
    return 502 if status == 404 else status, {"error": error}
