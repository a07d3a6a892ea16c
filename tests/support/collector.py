"""An OpenTelemetry collector: takes traces over HTTP and keeps their spans."""

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Its `spans` are those that have come so far."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[Span] = []
        self._came = threading.Condition()

    def take(self, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        with self._came:
            self.spans += [
                span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans
            ]
            self._came.notify_all()

    def trace(self, whole: Callable[[list[Span]], bool], trace_id: bytes, timeout_s: float = 30.0) -> list[Span]:
        """The spans of a trace, once `whole` says that they are all there."""
        deadline = time.monotonic() + timeout_s
        with self._came:
            while not whole(found := [span for span in self.spans if span.trace_id == trace_id]):
                assert self._came.wait(deadline - time.monotonic()), found
        return found


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            collector.take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"http://127.0.0.1:{server.server_port}/v1/traces")
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield collector
        finally:
            server.shutdown()
