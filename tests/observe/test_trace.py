"""Traces of real engines: valid, on one clock, true to the step records, and the halves' overlap is in them."""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from raysonar import Engine, SamplingParams
from raysonar.demo import TARGET
from raysonar.errors import InvalidRequestError
from raysonar.observe.counters import EngineStats
from raysonar.observe.steps import StepRecord
from raysonar.observe.timeline import Lane

QUESTIONS = ["What is the capital of France?", "Describe the climate of Norway.", "Where is Chad?"]
ROUNDING_US = 0.002


@dataclass
class Traced:
    """A trace, and what the engine says of the same steps."""

    events: list[dict[str, Any]]
    records: list[StepRecord]
    stats: EngineStats
    processes: tuple[tuple[str, int], ...]

    def spans(self, **wanted: object) -> list[dict[str, Any]]:
        """The complete events with these values, by start."""
        found = [e for e in self.events if e["ph"] == "X" and all(e[key] == value for key, value in wanted.items())]
        return sorted(found, key=lambda event: (event["ts"], -event["dur"]))


def trace(path: Path, **options: Any) -> Traced:
    """Of some greedy answers, after some that are not traced."""
    with Engine.from_folder(TARGET, dtype="float32", threads=1, max_running=4, max_model_len=128, **options) as engine:
        prompts = [engine.tokenizer.render_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        engine.generate(prompts, params)
        before = engine.stats().steps
        with engine.trace(path):
            engine.generate(prompts, params)
        after = engine.stats()
        engine.generate(prompts, params)
        return Traced(
            events=json.loads(path.read_text())["traceEvents"],
            records=engine.steps.last()[before : after.steps],
            stats=engine.stats(),
            processes=engine.info.processes,
        )


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Traced:
    return trace(tmp_path_factory.mktemp("trace") / "alone.json")


@pytest.fixture(scope="module")
def pair(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    path = tmp_path_factory.mktemp("trace") / "pair.json"
    return trace(path, data_parallel=2, micro_batching="always", speculative_tokens=2)


@pytest.fixture(params=["alone", "pair"])
def traced(request: pytest.FixtureRequest) -> Traced:
    return request.getfixturevalue(request.param)


def test_every_event_is_in_chromes_format_and_its_process_and_thread_have_names(traced: Traced) -> None:
    names = {(e["name"], e["pid"], e["tid"]): e["args"] for e in traced.events if e["ph"] == "M"}
    spans = traced.spans()
    assert len(spans) > 100
    assert len(spans) + len(names) == len(traced.events)
    assert min(span["ts"] for span in spans) == 0
    for span in spans:
        assert isinstance(span["name"], str)
        assert span["cat"] in ("work", "wait", "transfer")
        assert span["dur"] >= 0
        assert names["thread_name", span["pid"], span["tid"]]["name"] == Lane(span["tid"]).title
        assert names["thread_sort_index", span["pid"], span["tid"]]["sort_index"] == span["tid"]
    for rank, (host, process) in enumerate(traced.processes):
        assert names["process_name", rank, 0]["name"] == f"rank {rank} ({host}, process {process})"


def test_every_rank_has_the_same_steps_and_they_are_those_of_the_records(traced: Traced) -> None:
    numbers = [record.number for record in traced.records]
    assert len(numbers) > 5
    for rank in range(len(traced.processes)):
        for part in ("take plan in", "propose", "target", "logits", "accept"):
            assert [span["args"]["step"] for span in traced.spans(pid=rank, name=part)] == numbers
        drafts = [span["args"]["step"] for span in traced.spans(pid=rank, name="draft")]
        assert drafts == (numbers if len(traced.processes) > 1 else numbers[:-1])  # in process, it is yet to come


def test_ranks_are_on_one_clock(pair: Traced) -> None:
    """All ranks exchange tokens in every step: none ends its target pass before another has begun."""
    for record in pair.records:
        passes = [span for span in pair.spans(name="target") if span["args"]["step"] == record.number]
        assert len(passes) == 2
        assert max(span["ts"] for span in passes) < min(end(span) for span in passes)


def test_spans_of_a_lane_nest_and_a_ranks_halves_never_compute_at_once(traced: Traced) -> None:
    for rank in range(len(traced.processes)):
        halves = (Lane.HALF_0, Lane.HALF_1)
        for lanes in ((Lane.STEP,), halves, (Lane.TRANSFERS_0,), (Lane.TRANSFERS_1,)):
            spans = [span for span in traced.spans(pid=rank) if span["tid"] in lanes]
            open_spans: list[dict[str, Any]] = []
            for span in spans:
                while open_spans and end(open_spans[-1]) <= span["ts"] + ROUNDING_US:
                    open_spans.pop()
                if open_spans:
                    assert end(span) <= end(open_spans[-1]) + ROUNDING_US
                    assert span["tid"] == open_spans[-1]["tid"]
                open_spans.append(span)


def test_the_parts_of_every_layer_are_there(traced: Traced) -> None:
    layers = {span["args"]["layer"] for span in traced.spans(name="attention")}
    assert layers == set(range(len(layers)))
    for rank, half in itertools.product(range(len(traced.processes)), (Lane.HALF_0, Lane.HALF_1)):
        if len(traced.processes) == 1 and half == Lane.HALF_1:
            assert traced.spans(tid=half) == []
            continue
        experts = {span["args"]["layer"] for span in traced.spans(pid=rank, tid=half, name="experts")}
        dense = {span["args"]["layer"] for span in traced.spans(pid=rank, tid=half, name="dense network")}
        assert experts | dense == layers
        assert not experts & dense
        for name in ("shared expert", "router"):
            assert {span["args"]["layer"] for span in traced.spans(pid=rank, tid=half, name=name)} == experts


def test_while_a_halfs_tokens_travel_the_other_half_computes(pair: Traced) -> None:
    for rank, half in itertools.product(range(2), (Lane.HALF_0, Lane.HALF_1)):
        other = Lane.HALF_1 if half == Lane.HALF_0 else Lane.HALF_0
        flights = pair.spans(pid=rank, tid=half + 1, name="dispatch") + pair.spans(
            pid=rank, tid=half + 1, name="combine"
        )
        work = [span for span in pair.spans(pid=rank, tid=other, cat="work") if span["name"] != "send to experts"]
        assert len(flights) > 50
        hidden = [any(flight["ts"] <= w["ts"] and end(w) <= end(flight) for w in work) for flight in flights]
        assert sum(hidden) > len(flights) / 4


def test_a_transfers_wait_ends_with_it(pair: Traced) -> None:
    for rank, half in itertools.product(range(2), (Lane.HALF_0, Lane.HALF_1)):
        for name in ("dispatch", "combine"):
            flights = pair.spans(pid=rank, tid=half + 1, name=name)
            waits = pair.spans(pid=rank, tid=half, name=f"wait for {name}")
            assert len(flights) == len(waits) > 20
            for flight, wait in zip(flights, waits, strict=True):
                assert flight["ts"] <= wait["ts"]
                assert end(wait) <= end(flight)


def test_the_records_say_what_the_trace_shows(traced: Traced) -> None:
    exposed: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for rank in range(len(traced.processes)):
        accepted = {span["args"]["step"]: end(span) for span in traced.spans(pid=rank, name="accept")}
        for span in traced.spans(pid=rank, cat="wait"):
            step = span["args"]["step"]
            if span["name"] != "wait for plan" and span["ts"] < accepted[step]:
                exposed[step][rank] += span["dur"]
    for record in traced.records:
        slowest = max(exposed[record.number].values(), default=0)
        assert record.verify_exposed_seconds == pytest.approx(slowest / 1e6, rel=1e-3, abs=1e-9)
    assert (len(traced.processes) > 1) == any(record.verify_exposed_seconds for record in traced.records)


def test_the_records_parts_fit_together(traced: Traced) -> None:
    ranks = len(traced.processes)
    for record in traced.records:
        assert 0 <= record.verify_exposed_seconds <= record.verify_seconds
        assert 0 <= record.draft_exposed_seconds <= record.draft_seconds
        assert record.exposed_seconds == record.verify_exposed_seconds + record.draft_exposed_seconds
        assert record.seconds == record.wait_seconds + record.verify_seconds + record.draft_seconds
        assert 0 <= record.wait_share < 1
        assert record.halves == (1 if ranks == 1 else 2)
    assert sum(record.prefill_tokens for record in traced.records) > 0
    stats = traced.stats
    assert stats.split_steps == (0 if ranks == 1 else stats.steps)
    assert stats.wait_seconds + stats.exposed_seconds <= stats.rank_seconds
    assert (stats.exposed_seconds > 0) == (ranks > 1)


def test_one_trace_at_a_time_into_a_file_that_can_be_written(tmp_path: Path) -> None:
    with Engine.from_folder(TARGET, threads=1, max_running=1, max_model_len=64) as engine:
        with pytest.raises(InvalidRequestError, match="No such file"), engine.trace(tmp_path / "none" / "trace.json"):
            raise AssertionError("not reached")
        with engine.trace(tmp_path / "first.json"):
            with pytest.raises(InvalidRequestError, match="traced already"), engine.trace(tmp_path / "second.json"):
                raise AssertionError("not reached")
            engine.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
        with engine.trace(tmp_path / "second.json"):
            pass
    assert len(json.loads((tmp_path / "first.json").read_text())["traceEvents"]) > 10
    assert {event["ph"] for event in json.loads((tmp_path / "second.json").read_text())["traceEvents"]} == {"M"}


def end(span: dict[str, Any]) -> float:
    return float(span["ts"] + span["dur"])
