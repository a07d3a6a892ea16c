"""Figures from records that are known."""

from pathlib import Path

import numpy as np
import pytest

from raysonar.bench.plot import check_plot
from raysonar.bench.prompts import Lengths, random_samples, samples_of_file
from raysonar.bench.records import Record
from raysonar.bench.report import Objectives, report, text
from raysonar.bench.serve import Load, arrivals
from raysonar.errors import ConfigurationError

USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 5,
    "completion_tokens_details": {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1},
}


def watched(due: float, *moments: float) -> Record:
    """A streamed answer whose pieces came at these moments after it was due."""
    record = Record(due)
    for moment in moments:
        record.see(moment)
    record.count(dict(USAGE))
    return record


RECORDS = [watched(0.0, 0.1, 0.2, 0.4, 0.5), watched(1.0, 0.3, 0.6, 1.1), Record(2.0, seconds=0.5, error="no")]


def test_rates_and_latencies_are_what_the_records_say():
    figures = report(RECORDS, Objectives({}))
    assert (figures["requests"], figures["failed"], figures["errors"]) == (3, 1, {"no": 1})
    assert figures["seconds"] == pytest.approx(2.5)
    assert figures["requests_per_s"] == pytest.approx(2 / 2.5)
    assert figures["tokens_per_s"] == pytest.approx(10 / 2.5)
    assert figures["total_tokens_per_s"] == pytest.approx(24 / 2.5)
    assert figures["acceptance"] == pytest.approx(6 / 8)
    latency = figures["latency_ms"]
    assert (latency["ttft"]["mean"], latency["ttft"]["max"]) == pytest.approx((200, 300))
    assert latency["itl"]["mean"] == pytest.approx((100 + 200 + 100 + 300 + 500) / 5)
    assert latency["tpot"]["mean"] == pytest.approx((400 / 4 + 800 / 4) / 2)
    assert latency["e2e"]["p50"] == pytest.approx(np.percentile([500, 1100], 50))
    assert "goodput" not in figures


@pytest.mark.parametrize(
    ("objectives", "met"),
    [(["ttft=150"], 1), (["ttft=300"], 2), (["tpot=150", "ttft=300"], 1), (["e2e=100"], 0), (["e2e=1100"], 2)],
)
def test_goodput_counts_answers_that_meet_every_objective_and_no_failure(objectives: list[str], met: int):
    good = report(RECORDS, Objectives.parse(objectives))["goodput"]
    assert (good["requests"], good["share"]) == (met, pytest.approx(met / 3))
    assert good["requests_per_s"] == pytest.approx(met / 2.5)


@pytest.mark.parametrize("word", ["ttft", "ttft=x", "ttft=-1", "itl=5", "e2e=nan"])
def test_an_objective_that_is_none_is_refused(word: str):
    with pytest.raises(ConfigurationError, match=word):
        Objectives.parse([word])


def test_no_answer_at_all_has_no_latencies():
    figures = report([Record(0.0, error="no")], Objectives.parse(["ttft=1"]))
    assert set(figures["latency_ms"].values()) == {None}
    assert figures["acceptance"] is None
    assert text(figures).startswith("1 requests in 0.0 s, 1 failed")


@pytest.mark.parametrize(("rate", "requests"), [(0.5, 1), (0.5, 3), (1000.0, 50)])
def test_constant_arrivals_are_evenly_spaced(rate: float, requests: int):
    dues = arrivals(Load(requests=requests, rate=rate, poisson=False))
    assert dues == pytest.approx([number / rate for number in range(requests)])


def test_poisson_arrivals_have_the_rate_and_the_spread_of_one_and_depend_on_the_seed_alone():
    load = Load(requests=20_001, rate=50.0, seed=3)
    gaps = np.diff(arrivals(load))
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.03)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.05)
    assert arrivals(load) == arrivals(load)
    assert arrivals(load) != arrivals(Load(requests=20_001, rate=50.0, seed=4))


def test_random_prompts_have_the_lengths_asked_for_and_the_same_seed_gives_the_same():
    draw = random_samples(Lengths(3, 5), Lengths(7, 9), seed=1)
    samples = [next(draw) for _ in range(200)]
    assert {len(sample.text.split()) for sample in samples} == {3, 4, 5}
    assert {sample.max_tokens for sample in samples} == {7, 8, 9}
    again = random_samples(Lengths(3, 5), Lengths(7, 9), seed=1)
    assert [next(again) for _ in range(200)] == samples


def test_a_dataset_may_be_sharegpts_or_prompts_or_messages_and_is_used_again_when_it_ends(tmp_path: Path):
    listed, lines = tmp_path / "list.json", tmp_path / "lines.jsonl"
    listed.write_text(
        '[{"id": "1", "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]'
    )
    lines.write_text('{"prompt": "c"}\n\n"d"\n{"messages": [{"role": "user", "content": "e"}]}\n')
    assert next(samples_of_file(listed, None, 0)).text == "a"
    draw = samples_of_file(lines, Lengths(4, 4), 0)
    first, second = ({next(draw).text for _ in range(3)} for _ in range(2))
    assert first == second == {"c", "d", "e"}
    for content, words in (('{"x": 1}', "lines.jsonl, 1"), ("{", "not read"), ("", "no prompt")):
        lines.write_text(content)
        with pytest.raises(ConfigurationError, match=words):
            next(samples_of_file(lines, None, 0))


def test_a_plot_without_matplotlib_or_its_folder_is_refused_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ConfigurationError, match=r"a plot is a \.png"):
        check_plot(tmp_path / "x.pdf")
    with pytest.raises(ConfigurationError, match="no folder"):
        check_plot(tmp_path / "no" / "x.png")
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(ConfigurationError, match=r"install raysonar\[plot\]"):
        check_plot(tmp_path / "x.png")
