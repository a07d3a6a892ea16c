"""The ingress deployment: OpenAI's HTTP API in front of the driver."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any, TypeVar, cast

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponse, DeploymentResponseGenerator
from starlette.exceptions import HTTPException

from raysonar.driver.outputs import Delta
from raysonar.observe.metrics import HTTP_REQUESTS
from raysonar.serving.generation import Batch, Generation, Vocabulary
from raysonar.serving.metrics import CONTENT_TYPE, RayExporter, Source, StatusCounter, exposition, replica_labels
from raysonar.serving.problems import (
    MAX_BODY_BYTES,
    Problem,
    ProblemError,
    model_not_found,
    problem_of,
    route_problem,
    too_large,
    unavailable,
)
from raysonar.serving.protocol import ChatBody, CompletionBody, GenerationBody
from raysonar.serving.responses import Answer, ChatAnswer, CompletionAnswer, event

PROBE_TIMEOUT_S = 5.0
"""A driver that does not answer a probe for this long is not well."""

_STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Events pass on at once, past caches and nginx."""

Deltas = list[tuple[int, Delta]]
Body = TypeVar("Body", bound=GenerationBody)
logger = logging.getLogger("ray.serve")


@serve.ingress()
class Ingress:
    """Checks requests, hands them to the driver, and writes its deltas in OpenAI's shapes."""

    def __init__(self, driver: DeploymentHandle[Any], model: str, max_ongoing: int, start_timeout_s: float) -> None:
        """A request beyond `max_ongoing` is refused; one that no driver takes within `start_timeout_s` fails."""
        self._driver = driver
        self._streaming_driver = driver.options(stream=True)
        self._model = model
        self._max_ongoing = max_ongoing
        self._start_timeout_s = start_timeout_s
        self._ongoing = 0
        self._created = int(time.time())
        self._vocabulary: Vocabulary | None = None
        self._statuses: Counter[str] = Counter()
        self._labels = replica_labels(model)
        self._exporter = RayExporter(lambda: [(HTTP_REQUESTS, dict(self._statuses))], self._labels)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """What Serve runs for each request."""
        app = FastAPI(title="raysonar", openapi_url=None)
        app.add_api_route("/v1/models", self.models)
        app.add_api_route("/v1/models/{model:path}", self.model)
        app.add_api_route("/v1/completions", self.completions, methods=["POST"])
        app.add_api_route("/v1/chat/completions", self.chat_completions, methods=["POST"])
        app.add_api_route("/health", self.health)
        app.add_api_route("/ready", self.ready)
        app.add_api_route("/metrics", self.metrics)
        app.add_middleware(StatusCounter, counts=self._statuses)
        app.add_exception_handler(HTTPException, _no_route)
        return app

    async def models(self) -> Response:
        """The one model."""
        return JSONResponse({"object": "list", "data": [self._model_object()]})

    async def model(self, model: str) -> Response:
        """The model by its name."""
        if model != self._model:
            return _problem_response(model_not_found(model, self._model))
        return JSONResponse(self._model_object())

    def _model_object(self) -> dict[str, object]:
        return {"id": self._model, "object": "model", "created": self._created, "owned_by": "raysonar"}

    async def health(self) -> Response:
        """200 while the driver's engine is alive and not stuck, however busy it is."""
        return await self._probe("ok")

    async def ready(self) -> Response:
        """200 once tokens have been generated through the engine: a driver is up only after that."""
        return await self._probe("ready")

    async def metrics(self) -> Response:
        """Prometheus' text format: the figures of every driver that answers, and this ingress's own."""
        try:
            reports = await self._driver.broadcast("report").results_async(
                timeout_s=PROBE_TIMEOUT_S, return_exceptions=True
            )
        except Exception:
            logger.exception("No driver reports its metrics")
            reports = []
        own = Source(self._labels, [(HTTP_REQUESTS, dict(self._statuses))])
        sources = [own, *(report for report in reports if isinstance(report, Source))]
        return Response(exposition(sources), media_type=CONTENT_TYPE)

    async def completions(self, request: Request) -> Response:
        """OpenAI's /v1/completions."""
        return await self._respond(request, CompletionBody, CompletionAnswer)

    async def chat_completions(self, request: Request) -> Response:
        """OpenAI's /v1/chat/completions."""
        return await self._respond(request, ChatBody, ChatAnswer)

    async def _respond(
        self, request: Request, body_type: type[Body], answer_type: Callable[[Body, Vocabulary | None], Answer]
    ) -> Response:
        """The answer, or what is wrong with the request, as long as no token is out."""
        try:
            body = body_type.model_validate_json(await _read(request))
            if body.model != self._model:
                raise model_not_found(body.model, self._model)
            params = body.sampling()
            answer = answer_type(body, await self._vocabulary_for(body))
            deltas = self._generate(Generation(answer.id, body.prompts, params, whole=not body.stream))
            if not body.stream:
                async with aclosing(deltas):
                    return JSONResponse(answer.whole([news async for batch in deltas for news in batch]))
            first = await anext(deltas)
            return StreamingResponse(_events(answer, first, deltas), headers=_STREAM_HEADERS)
        except Exception as error:
            return _problem_response(error)

    async def _generate(self, generation: Generation) -> AsyncGenerator[Deltas]:
        """The driver's deltas, in batches. Closing it stops the generation."""
        if self._ongoing >= self._max_ongoing:
            raise unavailable(f"{self._ongoing} requests are being served, as many as can be", "overloaded")
        self._ongoing += 1
        batches = cast(DeploymentResponseGenerator[Batch], self._streaming_driver.stream.remote(generation))
        try:
            async with asyncio.timeout(self._start_timeout_s):
                await anext(batches)
            async for batch in batches:
                if isinstance(batch, Problem):
                    raise ProblemError(batch)
                yield batch
        finally:
            self._ongoing -= 1
            batches.cancel()  # type: ignore[no-untyped-call]

    async def _vocabulary_for(self, body: GenerationBody) -> Vocabulary | None:
        if body.needs_vocabulary and self._vocabulary is None:
            async with asyncio.timeout(self._start_timeout_s):
                self._vocabulary = await self._driver.vocabulary.remote()
        return self._vocabulary

    async def _probe(self, status: str) -> Response:
        probe = cast(DeploymentResponse[None], self._driver.check_health.remote())
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await probe
        except Exception:
            probe.cancel()  # type: ignore[no-untyped-call]
            return _problem_response(unavailable(f"The engine is not {status}", "engine_unavailable"))
        return JSONResponse({"status": status})


async def _events(answer: Answer, first: Deltas, deltas: AsyncGenerator[Deltas]) -> AsyncGenerator[bytes]:
    """Server-sent events; one chunk for deltas that came together."""
    async with aclosing(deltas):
        try:
            yield answer.opening() + answer.events(first)
            async for batch in deltas:
                if events := answer.events(batch):
                    yield events
            yield answer.closing()
        except Exception as error:
            yield event(_problem(error).body())


async def _read(request: Request) -> bytes:
    """The body; one that is too large is not held, only counted, so that its sender comes to the answer."""
    body, size = bytearray(), 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= MAX_BODY_BYTES:
            body += chunk
        else:
            body.clear()
    if size > MAX_BODY_BYTES:
        raise too_large(size)
    return bytes(body)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _problem_response(ProblemError(route_problem(error.status_code, request.method, request.url.path)))


def _problem(error: Exception) -> Problem:
    """Logs what is the server's own fault."""
    problem = problem_of(error)
    if problem.status == 500:
        logger.error("A request failed", exc_info=error)
    return problem


def _problem_response(error: Exception) -> Response:
    problem = _problem(error)
    return JSONResponse(problem.body(), problem.status, headers=problem.headers)
