"""Totals of answers, from moments that the test sets."""

import pytest

from raysonar.observe import answers
from raysonar.observe.answers import AnswerTotals, Moments


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return 1e9 + self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(answers, "time", clock)
    return clock


def run(clock: Clock, totals: AnswerTotals, reason: str) -> Moments:
    """An answer of six tokens: queued for 1 s, prefilled for 2, then 3 tokens after 0.3 s and 2 after 0.1."""
    moments = Moments(arrived_at=clock.time(), arrived=clock.now)
    clock.now += 1
    moments.admit()
    clock.now += 2
    totals.gave_out(moments, 1)
    clock.now += 0.3
    totals.gave_out(moments, 3)
    moments.admit()  # again, after a preemption: that changes nothing
    totals.gave_out(moments, 0)
    clock.now += 0.1
    totals.gave_out(moments, 2)
    totals.finish(moments, reason, 7)
    return moments


def test_an_answers_times_add_up(clock: Clock):
    totals = AnswerTotals()
    moments = run(clock, totals, "stop")
    assert totals.queue.sum == pytest.approx(moments.queue_seconds) == pytest.approx(1.0)
    assert totals.prefill.sum == pytest.approx(2.0)
    assert totals.first_token.sum == pytest.approx(moments.first_token_seconds) == pytest.approx(3.0)
    assert totals.decode.sum == pytest.approx(0.4)
    assert totals.per_token.sum == pytest.approx(0.4 / 5)
    assert totals.whole.sum == pytest.approx(moments.seconds) == pytest.approx(3.4)
    assert (totals.prompt_tokens.sum, totals.generated_tokens.sum) == (7, 6)
    assert totals.finished == {"stop": 1}


def test_time_between_tokens_counts_tokens_not_steps(clock: Clock):
    totals = AnswerTotals()
    run(clock, totals, "stop")
    assert totals.between_tokens.count == 5
    assert totals.between_tokens.sum == pytest.approx(0.4)
    up_to = dict(totals.between_tokens.cumulative())
    assert (up_to["0.04"], up_to["0.05"], up_to["0.075"], up_to["0.15"]) == (0, 2, 2, 5)


def test_an_answer_that_was_aborted_is_counted_but_its_latency_is_not(clock: Clock):
    totals = AnswerTotals()
    run(clock, totals, "abort")
    assert totals.finished == {"abort": 1}
    assert (totals.whole.count, totals.decode.count, totals.per_token.count) == (0, 0, 0)


def test_a_copy_does_not_grow_with_the_original(clock: Clock):
    totals = AnswerTotals()
    copy = totals.copy()
    run(clock, totals, "stop")
    assert (copy.whole.count, copy.finished.total(), totals.whole.count) == (0, 0, 1)
