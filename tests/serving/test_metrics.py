"""Metrics: what Prometheus reads after known traffic, from GET /metrics and from Ray's agent."""

import time

import httpx
import pytest
import ray
from support.prometheus import Scrape
from support.service import MODEL, Service

from raysonar.observe.histogram import Histogram
from raysonar.observe.metrics import CATALOGUE, Metric
from raysonar.serving.metrics import Source, exposition

COMPLETIONS = "/v1/completions"
TOKENS = 9
BODY = {"model": MODEL, "prompt": "The", "max_tokens": TOKENS, "ignore_eos": True, "temperature": 0}


def scrape(http: httpx.Client) -> Scrape:
    response = http.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    return Scrape(response.text)


def scrape_ray() -> Scrape:
    """What Ray's agent of this node would give to Prometheus."""
    [node] = ray.nodes()
    return Scrape(httpx.get(f"http://127.0.0.1:{node['MetricsExportPort']}/metrics", timeout=10).text)


class Growth:
    """How much series have grown between two scrapes."""

    def __init__(self, before: Scrape, after: Scrape) -> None:
        self._before, self._after = before, after

    def __call__(self, name: str, **labels: str) -> float:
        name = f"raysonar_{name}"
        return self._after.value(name, **labels) - self._before.value(name, **labels)


@pytest.fixture
def traffic(http: httpx.Client, service: Service) -> Growth:
    """Two answers of TOKENS tokens, one of two choices, and a request that is refused."""
    service.wait_until_idle()
    before = scrape(http)
    for more in ({}, {"n": 2}):
        assert http.post(COMPLETIONS, json=BODY | more).status_code == 200
    assert http.post(COMPLETIONS, json=BODY | {"n": 0}).status_code == 400
    service.wait_until_idle()
    return Growth(before, scrape(http))


def test_every_metric_of_the_catalogue_is_exposed_and_no_other(http: httpx.Client):
    expected = {name for metric in CATALOGUE for name in metric.series}
    expected -= {"raysonar_expert_tokens_total"}  # of groups that place their experts anew
    http.post(COMPLETIONS, json=BODY)
    assert scrape(http).names == expected


def test_metrics_count_what_was_asked_for(traffic: Growth):
    assert traffic("request_success_total", finished_reason="length") == 3
    assert traffic("generation_tokens_total") == 3 * TOKENS
    assert traffic("request_generation_tokens_sum") == 3 * TOKENS
    assert traffic("prompt_tokens_total") > 0
    assert traffic("http_requests_total", status="200") >= 3
    assert traffic("http_requests_total", status="400") == 1


def test_every_answer_and_every_token_is_in_the_latencies(traffic: Growth):
    for name in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_time_per_output_token_seconds",
    ):
        assert traffic(f"{name}_count") == 3
        assert traffic(f"{name}_bucket", le="+Inf") == 3
    assert traffic("inter_token_latency_seconds_count") == 3 * (TOKENS - 1)
    parts = [traffic(f"request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode")]
    assert min(parts) > 0
    assert sum(parts) <= traffic("e2e_request_latency_seconds_sum") <= sum(parts) + 0.5
    assert traffic("inter_token_latency_seconds_sum") == pytest.approx(parts[2])


def test_speculation_and_steps_are_counted(traffic: Growth):
    drafts, drafted = traffic("spec_decode_num_drafts_total"), traffic("spec_decode_num_draft_tokens_total")
    assert 0 < drafts == drafted  # one draft token a step
    assert traffic("spec_decode_num_draft_tokens_per_pos_total", position="0") == drafted
    accepted = traffic("spec_decode_num_accepted_tokens_total")
    assert 0 <= accepted == traffic("spec_decode_num_accepted_tokens_per_pos_total", position="0") <= drafted
    assert traffic("steps_total") >= TOKENS / 2
    assert traffic("step_decisions_total") == traffic("steps_total")
    assert 0 < traffic("step_seconds_total") < traffic("e2e_request_latency_seconds_sum") + 1


def test_an_idle_service_holds_nothing(http: httpx.Client, service: Service):
    service.wait_until_idle()
    idle = scrape(http)
    assert {idle.value(f"raysonar_{name}") for name in ("num_requests_running", "num_requests_waiting")} == {0}
    assert idle.value("raysonar_kv_cache_usage_perc") == 0
    assert idle.value("raysonar_num_slots") > 0


def test_labels_are_few(http: httpx.Client):
    http.post(COMPLETIONS, json=BODY)
    seen = scrape(http)
    for metric in CATALOGUE:
        own = set() if metric.label is None else {metric.label}
        for name in metric.series:
            for labels in seen.labels(name):
                assert labels.keys() - {"le"} == {"model_name", "replica"} | own
                assert labels["model_name"] == MODEL
                assert labels["replica"]


def test_rays_agent_says_the_same(http: httpx.Client, service: Service):
    http.post(COMPLETIONS, json=BODY)
    service.wait_until_idle()
    ours = scrape(http)
    compared = [
        "raysonar_generation_tokens_total",
        "raysonar_steps_total",
        "raysonar_num_slots",
        "raysonar_request_success_total",
        "raysonar_spec_decode_num_accepted_tokens_per_pos_total",
        "raysonar_inter_token_latency_seconds_count",
        *(f"raysonar_{name}_bucket" for name in ("inter_token_latency_seconds", "e2e_request_latency_seconds")),
    ]
    replica = ours.labels("raysonar_num_slots")[0]["replica"]
    expected = {name: ours.value(name, replica=replica) for name in compared}
    deadline = time.monotonic() + 60
    found: dict[str, float] = {}
    while found != expected:
        assert time.monotonic() < deadline, (found, expected)
        agent = scrape_ray()
        found = {name: agent.value(f"ray_{name}", replica=replica) for name in compared}


def test_sources_become_series_of_one_family():
    histogram = Histogram((0.5, 1.0))
    histogram.observe(0.75, 2)
    gauge, seconds = Metric("raysonar_g", "gauge", "g"), Metric("raysonar_s", "histogram", "s")
    by_rank = Metric("raysonar_c", "counter", "c", "rank")
    sources = [
        Source({"replica": each}, [(gauge, 2.0), (by_rank, {"0": 1.0, "1": 3.0}), (seconds, histogram)])
        for each in ("a", "b")
    ]
    found = Scrape(exposition(sources).decode())
    assert found.value("raysonar_g", replica="a") == 2
    assert found.value("raysonar_c_total", replica="b", rank="1") == 3
    assert found.value("raysonar_s_bucket", replica="a", le="0.5") == 0
    assert found.value("raysonar_s_bucket", replica="a", le="1.0") == 2
    assert found.value("raysonar_s_sum", replica="b") == 1.5
    assert exposition(sources).decode().count("# TYPE raysonar_s histogram") == 1
