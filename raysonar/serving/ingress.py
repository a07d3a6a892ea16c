"""The ingress deployment: OpenAI's HTTP API in front of the driver."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any, TypeVar, cast

import ray
from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponse
from starlette.exceptions import HTTPException

from raysonar.config import ReasoningParserName, ServiceConfig, ToolParserName
from raysonar.observe.metrics import HTTP_REQUESTS
from raysonar.serving.access import Access, ApiKeys
from raysonar.serving.answering import Answering
from raysonar.serving.asleep import is_asleep
from raysonar.serving.body import Body
from raysonar.serving.deadlines import shorter, within
from raysonar.serving.feed import FedStream, Feed
from raysonar.serving.generation import Deltas, Generation, Profile, Vocabulary
from raysonar.serving.journal import Entry, Journal
from raysonar.serving.metrics import CONTENT_TYPE, RayExporter, Source, StatusCounter, exposition, replica_labels
from raysonar.serving.openapi import document
from raysonar.serving.problems import (
    Problem,
    ProblemError,
    model_not_found,
    problem_of,
    route_problem,
    unavailable,
)
from raysonar.serving.protocol import ChatBody, CompletionBody, GenerationBody
from raysonar.serving.replicas import answers_of_all, end_actor
from raysonar.serving.responses import Answer, event
from raysonar.serving.resuming import asked, resumed
from raysonar.serving.steps import Steps
from raysonar.serving.tokens import DetokenizeBody, TokenizeBody
from raysonar.serving.web import add_page

PROBE_TIMEOUT_S = 5.0
"""A driver that does not answer a probe for this long is not well."""

_STREAM_HEADERS = {"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
"""Events pass on at once, past caches and nginx."""

AnyBody = TypeVar("AnyBody", bound=Body)
Value = TypeVar("Value")
logger = logging.getLogger("ray.serve")


@serve.ingress()
class Ingress:
    """Checks requests, hands them to the driver, and writes its deltas in OpenAI's shapes."""

    def __init__(self, driver: DeploymentHandle[Any], model: str, config: ServiceConfig) -> None:
        """`model` is what clients ask for. Raises ConfigurationError for keys that cannot be read."""
        self._driver = driver
        self._streaming_driver = driver.options(stream=True)
        self._steps = Steps(driver)
        self._model = model
        self._config = config
        self._keys = None if config.api_keys_file is None else ApiKeys(config.api_keys_file)
        self._ongoing = 0
        self._created = int(time.time())
        self._answering = Answering(
            self._model_profile, self._vocabulary_of_model, config.tool_parser, config.reasoning_parser
        )
        self._vocabulary: Vocabulary | None = None
        self._profile: Profile | None = None
        self._journal = Journal(model, config.trace_endpoint)
        self._statuses: Counter[str] = Counter()
        self._labels = replica_labels(model)
        self._feed = Feed(str(ray.util.get_node_ip_address()), end_actor)  # type: ignore[no-untyped-call]
        self._exporter = RayExporter(lambda: [(HTTP_REQUESTS, dict(self._statuses))], self._labels)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """What Serve runs for each request."""
        app = FastAPI(openapi_url=None)
        app.add_api_route("/openapi.json", self.openapi)
        app.add_api_route("/v1/models", self.models)
        app.add_api_route("/v1/models/{model:path}", self.model)
        app.add_api_route("/v1/completions", self.completions, methods=["POST"])
        app.add_api_route("/v1/chat/completions", self.chat_completions, methods=["POST"])
        app.add_api_route("/tokenize", self.tokenize, methods=["POST"])
        app.add_api_route("/detokenize", self.detokenize, methods=["POST"])
        app.add_api_route("/v1/steps", self.steps)
        app.add_api_route("/v1/steps/trace", self.trace_steps, methods=["POST"])
        app.add_api_route("/health", self.health)
        app.add_api_route("/ready", self.ready)
        app.add_api_route("/metrics", self.metrics)
        add_page(app)
        app.add_middleware(Access, keys=self._keys, limits=self._config.limits)
        if self._config.allowed_origins:
            app.add_middleware(
                CORSMiddleware,
                allow_origins=self._config.allowed_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["Authorization", "Content-Type"],
            )
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

    def settings(self) -> tuple[str, ToolParserName, ReasoningParserName]:
        """What this service calls its model, and its parsers: for those who ask the driver themselves."""
        return self._model, self._answering.tool_parser, self._answering.reasoning_parser

    def _model_object(self) -> dict[str, object]:
        return {"id": self._model, "object": "model", "created": self._created, "owned_by": "raysonar"}

    async def openapi(self) -> Response:
        """The schema of all this."""
        return JSONResponse(document(self._model, asks_for_keys=self._config.api_keys_file is not None))

    async def health(self) -> Response:
        """200 while a driver's engine is alive and not stuck, however busy it is, and while none is needed."""
        return await self._probe("ok")

    async def ready(self) -> Response:
        """200 once tokens have been generated through an engine: a driver is up only after that."""
        return await self._probe("ready")

    async def metrics(self) -> Response:
        """Prometheus' text format: the figures of every driver that answers, and this ingress's own."""
        try:
            reports = await answers_of_all(self._driver, "report", timeout_s=PROBE_TIMEOUT_S)
        except Exception:
            logger.exception("No driver reports its metrics")
            reports = []
        own = Source(self._labels, [(HTTP_REQUESTS, dict(self._statuses))])
        sources = [own, *(report for report in reports if isinstance(report, Source))]
        return Response(exposition(sources), media_type=CONTENT_TYPE)

    async def steps(self, request: Request) -> Response:
        """Records of each engine's last steps."""
        try:
            return JSONResponse(await self._steps.records(request.query_params))
        except Exception as error:
            return _problem_response(error)

    async def trace_steps(self, request: Request) -> Response:
        """A trace of each engine's next steps."""
        try:
            return Response(await self._steps.trace(await request.body()), media_type="application/json")
        except Exception as error:
            return _problem_response(error)

    async def completions(self, request: Request) -> Response:
        """OpenAI's /v1/completions."""
        return await self._respond(request, CompletionBody)

    async def chat_completions(self, request: Request) -> Response:
        """OpenAI's /v1/chat/completions."""
        return await self._respond(request, ChatBody)

    async def tokenize(self, request: Request) -> Response:
        """A prompt's token ids."""
        try:
            body = await self._body(request, TokenizeBody)
            profile = await self._model_profile()
            tokens = await self._ask(
                lambda: self._driver.tokenize.remote(body.text, body.add_special_tokens is not False)
            )
            vocabulary = await self._vocabulary_of_model() if body.return_token_strs else None
        except Exception as error:
            return _problem_response(error)
        spelt = vocabulary and [vocabulary.text(token) for token in tokens]
        counts = {"count": len(tokens), "max_model_len": profile.max_model_len}
        return JSONResponse({**counts, "tokens": tokens, "token_strs": spelt})

    async def detokenize(self, request: Request) -> Response:
        """The text of token ids."""
        try:
            body = await self._body(request, DetokenizeBody)
            return JSONResponse({"prompt": await self._ask(lambda: self._driver.detokenize.remote(body.tokens))})
        except Exception as error:
            return _problem_response(error)

    async def _body(self, request: Request, body_type: type[AnyBody]) -> AnyBody:
        """The checked body of a request for this model."""
        body = body_type.model_validate_json(await request.body())
        model = getattr(body, "model", None)
        if model is not None and model != self._model:
            raise model_not_found(model, self._model)
        return body

    async def _respond(self, request: Request, body_type: type[GenerationBody]) -> Response:
        """The answer, or what is wrong with the request, as long as no token is out."""
        try:
            body = await self._body(request, body_type)
            answer, generation = await self._answering.begin(body)
            entry = Entry(answer.id, request.headers, getattr(request.state, "api_key", None))
            seconds = shorter(body.timeout, self._config.limits.timeout_s)
            deltas = self._journal.recorded(entry, self._generate(generation, seconds))
            if not body.stream:
                async with aclosing(deltas):
                    return JSONResponse(answer.whole([news async for batch in deltas for news in batch]))
            first = await anext(deltas)
            return StreamingResponse(_events(answer, first, deltas), headers=_STREAM_HEADERS)
        except Exception as error:
            return _problem_response(error)

    async def _generate(self, generation: Generation, seconds: float | None) -> AsyncGenerator[Deltas]:
        """The driver's deltas, in batches. Closing it stops the generation, as does the end of its time."""
        if self._ongoing >= self._config.max_ongoing_requests:
            raise unavailable(f"{self._ongoing} requests are being served, as many as can be", "overloaded")
        self._ongoing += 1
        try:
            sent = replace(generation, reader=await self._feed.reader())
            stream = resumed(self._open, sent, self._config.start_timeout_s)
            async with aclosing(stream):
                async for deltas in within(seconds, stream):
                    yield deltas
        finally:
            self._ongoing -= 1

    def _open(self, generation: Generation) -> FedStream:
        return self._feed.opened(generation.request_id, self._streaming_driver.stream.remote(generation))

    async def _vocabulary_of_model(self) -> Vocabulary:
        if self._vocabulary is None:
            vocabulary: Vocabulary = await self._ask(lambda: self._driver.vocabulary.remote())
            self._vocabulary = vocabulary
        return self._vocabulary

    async def _model_profile(self) -> Profile:
        if self._profile is None:
            profile: Profile = await self._ask(lambda: self._driver.profile.remote())
            self._profile = profile
        return self._profile

    async def _ask(self, ask: Callable[[], Awaitable[Value | Problem]]) -> Value:
        """What a driver answers, within the time that it has to start."""
        async with asyncio.timeout(self._config.start_timeout_s):
            value = await asked(ask)
        if isinstance(value, Problem):
            raise ProblemError(value)
        return value

    async def _probe(self, status: str) -> Response:
        may_sleep = self._config.replicas.min == 0
        if may_sleep and await asyncio.to_thread(is_asleep, self._driver.app_name, self._driver.deployment_name):
            return JSONResponse({"status": "asleep"})  # asking a driver would start one
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


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = _problem_response(ProblemError(route_problem(error.status_code, request.method, request.url.path)))
    response.headers.update(error.headers or {})
    return response


def _problem(error: Exception) -> Problem:
    """Logs what is the server's own fault."""
    problem = problem_of(error)
    if problem.status == 500:
        logger.error("A request failed", exc_info=error)
    return problem


def _problem_response(error: Exception) -> Response:
    problem = _problem(error)
    return JSONResponse(problem.body(), problem.status, headers=problem.headers)
