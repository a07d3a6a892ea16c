"""A line of log and a trace for each request, from a service that writes both."""

import json
import secrets
import sys
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
from support.collector import Collector, collecting
from support.service import MODEL, Deploy

from raysonar.errors import ConfigurationError
from raysonar.serving import journal
from raysonar.serving.app import build_app

COMPLETIONS = "/v1/completions"
BODY = {"model": MODEL, "prompt": "The", "max_tokens": 12, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def http(deploy: Deploy, folder: Path, collector: Collector) -> Iterator[httpx.Client]:
    args: dict[str, Any] = {
        "engine": {"model": str(folder)},
        "log_format": "json",
        "trace_endpoint": collector.url,
    }
    with httpx.Client(base_url=deploy("observed", build_app(args)).url, timeout=60.0) as client:
        yield client


def logged(request_id: str) -> dict[str, Any]:
    """The line of a request, from the ingress's log."""
    folder = Path(ray._private.worker._global_node.get_session_dir_path()) / "logs/serve"
    deadline = time.monotonic() + 20
    while True:
        for file in folder.glob("replica_observed_Ingress_*"):
            for line in file.read_text().splitlines():
                entry = json.loads(line).get("request")  # every line is an object
                if isinstance(entry, dict) and entry["id"] == request_id:
                    return entry
        assert time.monotonic() < deadline, sorted(folder.iterdir())


def test_each_request_leaves_one_line(http: httpx.Client):
    answer = http.post(COMPLETIONS, json=BODY | {"n": 2}).json()
    entry = logged(answer["id"])
    assert entry["outcome"] == "ok"
    assert entry["finish_reasons"] == "length,length"
    assert entry["answer_tokens"] == 24
    assert entry["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    details = answer["usage"]["completion_tokens_details"]
    assert entry["accepted_tokens"] == details["accepted_prediction_tokens"]
    assert entry["drafted_tokens"] == sum(details.values()) > 0
    assert 0 <= entry["queue_seconds"] < entry["first_token_seconds"] < entry["seconds"]
    assert "api_key" not in entry
    assert "The" not in entry.values()


def test_a_stream_that_the_client_leaves_is_logged_as_such(http: httpx.Client):
    with http.stream("POST", COMPLETIONS, json=BODY | {"max_tokens": 480, "stream": True}) as response:
        first = json.loads(next(response.iter_lines()).removeprefix("data: "))
    entry = logged(first["id"])
    assert entry["outcome"] == "client left"
    assert 0 < entry["answer_tokens"] < 480


def test_a_request_that_fails_is_logged_with_its_problem(http: httpx.Client):
    lines = []
    with http.stream(
        "POST", COMPLETIONS, json=BODY | {"max_tokens": 480, "n": 64, "stream": True, "timeout": 0.5}
    ) as r:
        lines = [json.loads(line.removeprefix("data: ")) for line in r.iter_lines() if line]
    assert logged(lines[0]["id"])["outcome"] == "504 deadline_exceeded"


def test_each_request_is_a_trace_that_goes_on_from_the_clients(http: httpx.Client, collector: Collector):
    trace_id, parent_id = secrets.token_bytes(16), secrets.token_bytes(8)
    headers = {"traceparent": f"00-{trace_id.hex()}-{parent_id.hex()}-01"}
    answer = http.post(COMPLETIONS, json=BODY, headers=headers).json()
    spans = {span.name: span for span in collector.trace(lambda found: len(found) == 4, trace_id)}
    assert spans.keys() == {"request", "queue", "prefill", "decode"}
    request = spans["request"]
    assert request.parent_span_id == parent_id
    attributes = {each.key: each.value for each in request.attributes}
    assert attributes["gen_ai.response.id"].string_value == answer["id"]
    assert attributes["gen_ai.usage.output_tokens"].int_value == 12
    assert attributes["gen_ai.request.model"].string_value == MODEL
    phases = [spans[name] for name in ("queue", "prefill", "decode")]
    assert {span.parent_span_id for span in phases} == {request.span_id}
    for before, after in pairwise(phases):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    slack = 50_000_000  # ns: the clocks of two processes' arithmetic
    assert request.start_time_unix_nano - slack <= phases[0].start_time_unix_nano
    assert phases[-1].end_time_unix_nano <= request.end_time_unix_nano + slack
    assert logged(answer["id"])["trace_id"] == trace_id.hex()


def test_a_request_without_a_trace_starts_one(http: httpx.Client, collector: Collector):
    answer = http.post(COMPLETIONS, json=BODY).json()
    trace_id = bytes.fromhex(logged(answer["id"])["trace_id"])
    spans = collector.trace(lambda found: len(found) == 4, trace_id)
    assert [span.parent_span_id for span in spans if span.name == "request"] == [b""]


def test_traces_without_their_packages_are_refused_at_the_start(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigurationError, match=r"raysonar\[traces\]"):
        journal.Journal(MODEL, "http://127.0.0.1:1/v1/traces")
