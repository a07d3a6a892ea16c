"""Tracks sum up what is waited for other ranks, and keep spans of traced steps only."""

import socket
from unittest.mock import MagicMock

import pytest
import ray

from raysonar.errors import EngineFailedError
from raysonar.observe.timeline import Lane, Timeline, Track, now
from raysonar.ranks.timelines import clock_offset, collect_timelines


def make() -> tuple[Timeline, Track, Track]:
    halves = Track(), Track()
    return Timeline(halves), *halves


def test_waits_are_summed_up_whether_traced_or_not():
    timeline, first, second = make()
    for traced in (False, True):
        timeline.begin(0, traced=traced)
        before, began = timeline.waited, now()
        with first.waiting("a"), pytest.raises(ZeroDivisionError), second.waiting("b"):
            _ = 1 / 0
        assert 0 < timeline.waited - before < 2 * (now() - began)
        assert timeline.waited == first.waited + second.waited
    assert [span.name for span in timeline.take()] == ["a", "b"]


def test_spans_of_traced_steps_are_kept_once_with_their_step_layer_and_lane():
    timeline, first, second = make()
    with first.span("untraced"):
        pass
    timeline.begin(7, traced=True)
    with timeline.frame.span("target"):
        second.layer = 3
        with second.span("attention"), second.span("inner"):
            pass
        second.keep("dispatch", "transfer", 1, 2)
    timeline.begin(8, traced=False)
    with first.span("untraced"), timeline.frame.span("untraced"):
        pass
    spans = timeline.take()
    assert [(span.name, span.kind, span.step, span.layer, span.lane) for span in spans] == [
        ("target", "work", 7, None, Lane.STEP),
        ("inner", "work", 7, 3, Lane.HALF_1),
        ("attention", "work", 7, 3, Lane.HALF_1),
        ("dispatch", "transfer", 7, 3, Lane.TRANSFERS_1),
    ]
    target, inner, attention, _ = spans
    assert target.start <= attention.start <= inner.start <= inner.end <= attention.end <= target.end
    assert timeline.take() == []


def test_a_plan_that_was_queued_was_not_waited_for():
    timeline, *_ = make()
    timeline.begin(0, traced=True)
    began = now()
    timeline.plan_came(began)
    assert 0 < timeline.plan_wait <= now() - began
    timeline.plan_came(None)
    assert timeline.plan_wait == 0
    assert [(span.name, span.start) for span in timeline.take()] == [("wait for plan", began)]


@pytest.mark.parametrize("ahead", [-5_000_000_000, 0, 123_456_789_000])
def test_another_hosts_clock_is_known_to_half_a_round_trip(ahead):
    began = now()
    found = clock_offset(lambda: now() + ahead)
    assert abs(found + ahead) <= now() - began


def test_ranks_that_are_gone_or_silent_are_failures_with_words(monkeypatch):
    here = (socket.gethostname(), 1)
    with pytest.raises(EngineFailedError, match="gone, or are being started again"):
        collect_timelines([], [here], 1.0)
    monkeypatch.setattr(ray, "get", MagicMock(side_effect=ray.exceptions.GetTimeoutError))
    with pytest.raises(EngineFailedError, match="did not hand out their timelines within 2 s"):
        collect_timelines([MagicMock()], [here], 2.0)


def test_spans_of_settled_steps_end_when_the_device_has_settled():
    settled = []
    halves = Track(), Track()
    timeline = Timeline(halves, settle=lambda: settled.append(now()))
    timeline.begin(1, traced=True)
    with halves[0].span("free"), halves[0].waiting("free too"):
        pass
    assert not settled
    timeline.begin(2, traced=True, settled=True)
    with halves[0].span("span"):
        pass
    with halves[1].waiting("wait"):
        pass
    *_, span, wait = timeline.take()
    assert len(settled) >= 3
    assert all(any(moment <= each.end for moment in settled if moment >= each.start) for each in (span, wait))
    timeline.begin(3, traced=False)
    settled.clear()
    with halves[0].waiting("untraced"):
        pass
    assert not settled
