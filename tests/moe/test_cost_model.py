"""The cost model says what its formulas say, and bends where measured points do."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from raysonar.moe.cost_model import Curve, LayerCost, PassCost, StepCost

SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
seconds = st.floats(1e-6, 1e-2)


def line(fixed: float, per_token: float) -> Curve:
    return Curve.of({tokens: fixed + per_token * tokens for tokens in SIZES})


def layer(w: float, a: float, latency: float, c: float, hidden: float = 0.0) -> LayerCost:
    return LayerCost(compute=line(w, a), communication=line(latency, c), hidden=line(hidden, 0))


def one_kind(count: int, cost: LayerCost, outside: float = 0.0) -> PassCost:
    return PassCost(layers={"experts": (count, cost)}, outside=line(outside, 0))


@settings(deadline=None)
@given(st.dictionaries(st.integers(1, 1000), st.floats(0, 1), min_size=1))
def test_a_curve_never_falls_and_keeps_the_sum_of_its_points(points: dict[int, float]) -> None:
    curve = Curve.of(points)
    assert list(curve.seconds) == sorted(curve.seconds)
    assert sum(curve.seconds) == pytest.approx(sum(points.values()))
    values = [curve(tokens) for tokens in range(1200)]
    assert all(after >= before - 1e-9 for before, after in itertools.pairwise(values))


@given(st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 1)), min_size=1, unique_by=lambda point: point[0]))
def test_a_curve_goes_through_points_that_do_not_fall(points: list[tuple[int, float]]) -> None:
    tokens, values = sorted(x for x, _ in points), sorted(y for _, y in points)
    curve = Curve.of(dict(zip(tokens, values, strict=True)))
    assert [curve(each) for each in tokens] == pytest.approx(values)


def test_a_curve_is_straight_between_and_beyond_its_points_and_nothing_takes_no_time() -> None:
    curve = Curve.of({2: 1.0, 4: 2.0, 8: 6.0})
    assert [curve(each) for each in (0, 1, 2, 3, 6, 8, 10)] == [0, 1, 1, 1.5, 4, 6, 8]


@given(seconds, seconds)
def test_a_line_through_points_of_a_line_is_that_line(fixed: float, per_token: float) -> None:
    assert line(fixed, per_token).line() == pytest.approx((fixed, per_token), rel=1e-6)


def test_no_more_is_hidden_than_travels_beyond_the_measured_points() -> None:
    hidden, communication = Curve.of({1: 0.0, 2: 5.0}), Curve.of({1: 6.0, 2: 6.0})
    cost = LayerCost(compute=line(1, 0), communication=communication, hidden=hidden)
    assert [cost.serial(tokens) for tokens in (1, 2, 3)] == [7, 2, 1]


@given(w=seconds, a=seconds, latency=seconds, c=seconds, half=st.integers(1, 128), layers=st.integers(1, 60))
def test_splitting_pays_per_layer_exactly_when_weights_are_read_faster_than_tokens_travel(
    w: float, a: float, latency: float, c: float, half: int, layers: int
) -> None:
    tokens = 2 * half
    cost = layer(w, a, latency, c)
    passes = one_kind(layers, cost)
    compute, communication = w + a * tokens, latency + c * tokens
    assert cost.serial(tokens) == pytest.approx(compute + communication)
    assert cost.split(half) == pytest.approx(
        max(2 * w + a * tokens, c * tokens, w + latency + (a + c) * half), rel=1e-6
    )
    assume(abs(communication - w) > 1e-6 * w and abs(compute - latency) > 1e-6 * latency)
    assert (cost.split(half) < cost.serial(tokens)) == (communication > w)
    assert passes.weights_outweigh(tokens, half) == (communication <= w)
    assert passes.latency_outweighs(tokens) == (compute <= latency)


def test_a_pass_adds_up_its_layers_what_is_outside_and_one_fill() -> None:
    experts, dense = layer(1, 0.5, 2, 0.25, hidden=0.5), layer(3, 0.125, 0, 0)
    passes = PassCost(layers={"experts": (10, experts), "dense": (2, dense)}, outside=line(7, 0))
    assert passes.serial(8) == pytest.approx(7 + 10 * (1 + 4 + 2 + 2 - 0.5) + 2 * (3 + 1))
    assert passes.split(8, 4) == pytest.approx(7 + 10 * 6 + 2 * 7 + 0.5)


@given(
    st.floats(1e-4, 1e-2), st.floats(1e-4, 1e-2), st.floats(0, 1e-2), st.floats(1e-4, 1e-2), st.integers(2, 40)
)  # fmt: skip
def test_a_split_pass_takes_what_two_halves_on_one_rank_and_one_link_take(
    before: float, experts: float, latency: float, sending: float, layers: int
) -> None:
    """Played through: a half's computing and sending are of both stages of a layer, which are even."""
    ends = _play(before, before, latency / 2, sending / 2, layers)
    half = LayerCost(
        compute=Curve.of({1: 2 * before}),
        communication=Curve.of({1: latency + sending, 2: latency + 2 * sending}),
        hidden=Curve.of({1: 0.0}),
    )
    assert experts > 0
    assert one_kind(layers, half).split(2, 1) == pytest.approx(ends, rel=0.12)


def _play(before: float, after: float, latency: float, sending: float, layers: int) -> float:
    """When two halves have gone through the layers on one rank, whose link sends one thing at a time."""
    rank = link = 0.0
    ready = [0.0, 0.0]
    for _ in range(layers):
        for stage in (before, after):
            for half in (0, 1):
                rank = max(rank, ready[half]) + stage
                link = max(link, rank) + sending
                ready[half] = link + latency
    return max(ready)


def test_rounds_of_the_draft_stand_before_the_result_and_its_run_over_the_batch_behind_it() -> None:
    verify, draft = one_kind(3, layer(1, 1, 1, 1)), one_kind(1, layer(0.5, 0.5, 0.5, 0.5), outside=2)
    cost = StepCost(verify=verify, draft=draft)
    assert cost.seconds([8, 4, 2]) == pytest.approx((3 * 18 + (2 + 5) + (2 + 3), 2 + 9))
    until_result = (3 * 10 + 2) + (2 + 3 + 0.5) + (2 + 2 + 0.25)
    assert cost.seconds([8, 4, 2], [4, 2, 1]) == pytest.approx((until_result, 2 + 5 + 1))
    assert StepCost(verify=verify, draft=None).seconds([8]) == pytest.approx((54, 0))
