"""What the service tells of its engines' steps, over real HTTP: records, and traces of a group of two ranks."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

import httpx
import pytest
from support.service import Service

CHAT = {
    "model": "pair",
    "messages": [{"role": "user", "content": "Describe the climate of Norway."}],
    "temperature": 0,
    "max_tokens": 40,
}
STEPS, TRACE = "/v1/steps", "/v1/steps/trace"


@pytest.fixture
def http(pair: Service) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=pair.url, timeout=60.0) as client:
        yield client


def chat(http: httpx.Client, **options: Any) -> dict[str, Any]:
    response = http.post("/v1/chat/completions", json={**CHAT, **options})
    assert response.status_code == 200, response.text
    return response.json()


def records(http: httpx.Client, last: int = 1024) -> list[dict[str, Any]]:
    """Of the one replica."""
    answer = http.get(STEPS, params={"last": last}).json()
    assert answer["object"] == "list"
    [replica] = answer["data"]
    assert replica["replica"]
    return replica["steps"]


def test_the_records_of_an_answers_steps_say_what_its_usage_says(http: httpx.Client):
    before = records(http)[-1]["number"]
    answer = chat(http)
    mine = [record for record in records(http) if record["number"] > before]
    assert [record["number"] for record in mine] == list(range(before + 1, before + 1 + len(mine)))
    details = answer["usage"]["completion_tokens_details"]
    assert sum(record["accepted"] for record in mine) == details["accepted_prediction_tokens"] > 0
    rejected = sum(record["drafted"] - record["accepted"] for record in mine)
    assert rejected == details["rejected_prediction_tokens"]
    assert sum(record["prefill_tokens"] for record in mine) == (
        answer["usage"]["prompt_tokens"] - answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    )
    assert all(record["verify_seconds"] > 0 and record["reason"] for record in mine)


def test_an_answers_tokens_come_from_where_its_usage_says(http: httpx.Client):
    answer = chat(http, return_token_origins=True)
    origins = answer["choices"][0]["token_origins"]
    usage = answer["usage"]
    assert len(origins) == usage["completion_tokens"]
    lost = usage["completion_tokens_details"]["accepted_prediction_tokens"] - origins.count("accepted")
    assert 0 <= lost <= 2  # accepted in the last step, behind the token that ended the answer
    assert origins[0] == "plain"
    assert {"accepted", "recovered", "bonus"} & set(origins)
    assert "token_origins" not in chat(http)["choices"][0]


def test_so_many_of_the_last_records_are_told(http: httpx.Client):
    chat(http)
    three, default, every = records(http, 3), http.get(STEPS).json()["data"][0]["steps"], records(http)
    assert three in [every[-3 - late : len(every) - late] for late in range(3)]  # a plan in flight is one step more
    assert len(default) == 64 or default[0] == every[0]


@pytest.mark.parametrize(
    ("query", "param"), [("last=0", "last"), ("last=1025", "last"), ("last=x", "last"), ("latest=3", "latest")]
)
def test_a_wrong_query_is_refused_by_name(http: httpx.Client, query: str, param: str):
    response = http.get(f"{STEPS}?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"steps": 0}, "steps"),
        ({"steps": 33}, "steps"),
        ({"steps": 1.5}, "steps"),
        ({"timeout": 0}, "timeout"),
        ({"timeout": 31}, "timeout"),
        ({"step": 3}, "step"),
        ([], None),
    ],
)
def test_a_wrong_trace_is_refused_by_name(http: httpx.Client, body: object, param: str | None):
    response = http.post(TRACE, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


def test_the_next_steps_of_all_ranks_are_traced_with_both_halves_and_their_communication(http: httpx.Client):
    with ThreadPoolExecutor(1) as pool:
        trace = pool.submit(http.post, TRACE, json={"steps": 3, "timeout": 30})
        while not trace.done():
            chat(http, n=4)
    assert trace.result().status_code == 200
    events = trace.result().json()["traceEvents"]
    lanes = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    spans = [event for event in events if event["ph"] == "X"]
    steps = sorted({span["args"]["step"] for span in spans})
    assert len(steps) == 3
    assert steps[-1] - steps[0] == 2
    for rank in (0, 1):
        found = {(lanes[span["pid"], span["tid"]], span["cat"]) for span in spans if span["pid"] == rank}
        for half in (0, 1):
            assert {(f"half {half}", "work"), (f"transfers {half}", "transfer")} <= found
    assert set(steps) <= {record["number"] for record in records(http)}


def test_a_trace_without_steps_ends_at_its_deadline(http: httpx.Client):
    response = http.post(TRACE, json={"timeout": 0.01})
    assert response.status_code == 200
    assert [event for event in response.json()["traceEvents"] if event["ph"] == "X"] == []


def test_one_trace_is_made_at_a_time(http: httpx.Client):
    with ThreadPoolExecutor(2) as pool:
        traces = [pool.submit(http.post, TRACE, json={"steps": 1, "timeout": 30}) for _ in range(2)]
        refused = next(as_completed(traces)).result()  # the other one waits for a step
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "trace_in_progress"
        while not all(trace.done() for trace in traces):
            chat(http)
    assert sorted(trace.result().status_code for trace in traces) == [200, 409]
