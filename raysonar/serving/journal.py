"""One line in the log for each request that has ended, and its trace where traces are wanted."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing
from typing import TYPE_CHECKING

from raysonar.errors import ConfigurationError
from raysonar.observe.answers import Moments
from raysonar.serving.generation import Deltas
from raysonar.serving.problems import problem_of
from raysonar.serving.responses import Usage

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_EXPORT_MS = 1000.0
logger = logging.getLogger("ray.serve")


class Entry:
    """What becomes of one request."""

    def __init__(self, request_id: str, headers: Mapping[str, str], api_key: str | None) -> None:
        """`headers` may hold the caller's trace; `api_key` is the name of the request's key."""
        self.headers = headers
        self.began_ns = time.time_ns()
        self.ended_ns = self.began_ns
        self.outcome = "ok"
        self.moments: list[Moments] = []
        """Of each answer that has ended."""
        self._id, self._api_key = request_id, api_key
        self._usage = Usage()
        self._reasons: list[str] = []

    def add(self, batch: Deltas) -> None:
        """Count deltas that go to the client."""
        for _, delta in batch:
            self._usage.add(delta)
            if delta.finish_reason is not None:
                self._reasons.append(delta.finish_reason)
                self.moments += [] if delta.moments is None else [delta.moments]

    def fields(self) -> dict[str, str | int | float]:
        """What the log says. Times are of the answer that was last, in seconds."""
        found: dict[str, str | int | float | None] = {
            "id": self._id,
            "outcome": self.outcome,
            "finish_reasons": ",".join(self._reasons),
            "api_key": self._api_key,
            "prompt_tokens": self._usage.prompt,
            "cached_tokens": self._usage.cached,
            "answer_tokens": self._usage.completion,
            "drafted_tokens": sum(self._usage.acceptance.drafted),
            "accepted_tokens": sum(self._usage.acceptance.accepted),
            "queue_seconds": _most(moments.queue_seconds for moments in self.moments),
            "first_token_seconds": _most(moments.first_token_seconds for moments in self.moments),
            "seconds": round((self.ended_ns - self.began_ns) / 1e9, 6),
        }
        return {name: value for name, value in found.items() if value is not None and value != ""}


class Journal:
    """Writes a line, and makes a trace, when a request ends."""

    def __init__(self, model: str, trace_endpoint: str | None) -> None:
        """`trace_endpoint`: where traces go, an OTLP collector's URL for HTTP. Raises ConfigurationError without the
        packages that this takes.
        """
        self._model = model
        self._tracer = None if trace_endpoint is None else _tracer(trace_endpoint)

    async def recorded(self, entry: Entry, deltas: AsyncGenerator[Deltas]) -> AsyncGenerator[Deltas]:
        """The deltas, as they are. Closing it closes them."""
        try:
            async with aclosing(deltas):
                async for batch in deltas:
                    entry.add(batch)
                    yield batch
        except (GeneratorExit, asyncio.CancelledError):
            entry.outcome = "client left"
            raise
        except Exception as error:
            problem = problem_of(error)
            entry.outcome = f"{problem.status} {problem.code or problem.param or problem.type}"
            raise
        finally:
            entry.ended_ns = time.time_ns()
            self._write(entry)

    def _write(self, entry: Entry) -> None:
        fields = entry.fields()
        if self._tracer is not None:
            fields["trace_id"] = _trace(self._tracer, self._model, entry, fields)
        words = " ".join(f"{name}={str(value).replace(' ', '_')}" for name, value in fields.items())
        logger.info("request ended: %s", words, extra={"request": fields})


def _most(values: Iterator[float | None]) -> float | None:
    return max((round(value, 6) for value in values if value is not None), default=None)


def _tracer(endpoint: str) -> "Tracer":
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigurationError(
            f"trace_endpoint needs the extra `traces`: pip install raysonar[traces] ({error})"
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": "raysonar"}))
    exporter = OTLPSpanExporter(endpoint=endpoint)
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=_EXPORT_MS))
    return provider.get_tracer("raysonar")


def _trace(tracer: "Tracer", model: str, entry: Entry, fields: Mapping[str, str | int | float]) -> str:
    """Make the request's spans, `request` and, of each answer, `queue`, `prefill` and `decode`; returns the trace's id.

    Names of attributes are OpenTelemetry's for generative models where it has one.
    """
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier = {name: entry.headers[name] for name in ("traceparent", "tracestate") if name in entry.headers}
    attributes = {
        "gen_ai.request.model": model,
        "gen_ai.response.id": fields["id"],
        "gen_ai.usage.input_tokens": fields["prompt_tokens"],
        "gen_ai.usage.output_tokens": fields["answer_tokens"],
        **{f"raysonar.{name}": value for name, value in fields.items() if name != "id"},
    }
    parent = TraceContextTextMapPropagator().extract(carrier)
    root = tracer.start_span("request", parent, SpanKind.SERVER, attributes, start_time=entry.began_ns)
    if entry.outcome != "ok":
        root.set_status(Status(StatusCode.ERROR, entry.outcome))
    inside = set_span_in_context(root)
    for moments in entry.moments:
        for name, began, ended in _phases(moments):
            tracer.start_span(name, inside, start_time=began).end(ended)
    root.end(entry.ended_ns)
    return f"{root.get_span_context().trace_id:032x}"


def _phases(moments: Moments) -> Iterator[tuple[str, int, int]]:
    """(name, begin, end) of an answer's phases, in nanoseconds since 1970."""
    ends = (moments.arrived, moments.admitted, moments.first_token, moments.last_token)
    for name, began, ended in zip(("queue", "prefill", "decode"), ends, ends[1:], strict=False):
        if began is not None and ended is not None:
            base = moments.arrived_at - moments.arrived
            yield name, round((base + began) * 1e9), round((base + ended) * 1e9)
