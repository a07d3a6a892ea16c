"""The decision to split a step: close to the better policy whatever the costs, and it says why."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raysonar.config import MicroBatching
from raysonar.driver.micro_batching import Decision, MicroBatcher
from raysonar.moe.cost_model import CostModel, Curve, LayerCost, PassCost, StepCost
from raysonar.observe.steps import Reason
from raysonar.step import StepPlan

SIZES = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512]


def costs(w: float, a: float, latency: float, c: float, *, split_tried: float | None = None) -> CostModel:
    """Ten layers with experts. split_tried: what split steps took when tried, as a multiple of unsplit ones."""

    def line(fixed: float, per_token: float) -> Curve:
        return Curve.of({tokens: fixed + per_token * tokens for tokens in SIZES})

    experts = LayerCost(compute=line(w, a), communication=line(latency, c), hidden=line(0, 0))
    verify = PassCost(layers={"experts": (10, experts)}, outside=line(0, 0))
    tried = {}
    if split_tried is not None:
        serial = {tokens: verify.serial(tokens) for tokens in SIZES}
        tried = {1: Curve.of(serial), 2: Curve.of({tokens: split_tried * took for tokens, took in serial.items()})}
    step = StepCost(verify=verify, draft=None, tried=tried)
    return CostModel(decode=step, prefill=step)


def plan(rows: int, tokens: int = 2) -> StepPlan:
    """Decode rows with one draft each."""
    return StepPlan(
        row_slot=np.arange(rows, dtype=np.int32),
        row_tokens=np.full(rows, tokens, np.int32),
        row_drafts=np.full(rows, tokens - 1, np.int32),
        row_samples=np.ones(rows, np.bool_),
        row_bound=np.full(rows, 100, np.int32),
    )


def decide(policy: MicroBatching, model: CostModel | None, rows: int) -> Decision:
    return MicroBatcher(policy, model).decide([plan(rows)], 1)[0]


@pytest.mark.parametrize(
    ("model", "rows", "halves", "reason"),
    [
        (costs(1e-3, 1e-4, 1e-3, 1e-4), 32, 2, Reason.GAIN),
        (costs(1e-3, 1e-4, 1e-4, 1e-6), 32, 1, Reason.COMMUNICATION_TOO_SHORT),
        (costs(1e-4, 1e-6, 1e-3, 1e-4, split_tried=1.05), 32, 1, Reason.COMPUTE_TOO_SHORT),
        (costs(1e-3, 1e-4, 1e-3, 1e-4, split_tried=1.05), 32, 1, Reason.NO_GAIN),
        (costs(1e-3, 1e-4, 1e-4, 1e-6, split_tried=0.9), 32, 2, Reason.GAIN),
        (costs(1e-3, 1e-4, 1e-3, 1e-4), 1, 1, Reason.ONE_ROW),
        (None, 32, 1, Reason.NOT_PROFILED),
    ],
)
def test_each_reason_has_its_case(model: CostModel | None, rows: int, halves: int, reason: Reason) -> None:
    decision = decide("auto", model, rows)
    assert (decision.halves, decision.reason) == (halves, reason)
    assert (decision.verify_seconds is None) == (model is None)


@pytest.mark.parametrize("model", [None, costs(1e-3, 1e-4, 1e-4, 1e-6)])
def test_a_configured_policy_is_followed_and_still_predicted(model: CostModel | None) -> None:
    for policy, halves in (("never", 1), ("always", 2)):
        decision = decide(policy, model, 32)
        assert (decision.halves, decision.reason) == (halves, Reason.CONFIGURED)
        assert (decision.verify_seconds is None) == (model is None)


def test_capacities_go_with_the_decision() -> None:
    _, whole = MicroBatcher("never").decide([plan(4), plan(6)], 1)
    _, half = MicroBatcher("always").decide([plan(4), plan(6)], 1)
    assert whole.tolist() == [[8, 12]]
    assert half.tolist() == [[4, 6]]


positive = st.floats(1e-5, 1e-2)


def run(batcher: MicroBatcher, truth: dict[int, float], noise: np.ndarray, rows: int) -> tuple[float, list[Decision]]:
    """Steps of one size: what they took without the noise that the batcher sees, plans two ahead of results."""
    total, decisions = 0.0, []
    for step, factor in enumerate(noise):
        decisions.append(batcher.decide([plan(rows)], 1)[0])
        if step >= 2:
            batcher.learn(decisions[step - 2], truth[decisions[step - 2].halves] * noise[step - 2])
        total += truth[decisions[-1].halves]
        assert factor > 0
    return total, decisions


@given(
    w=positive, a=st.floats(1e-6, 1e-3), latency=positive, c=st.floats(1e-6, 1e-3),
    rows=st.sampled_from([2, 8, 32, 128]), penalty=st.floats(0.95, 1.3), seed=st.integers(0, 1000),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_auto_is_within_three_percent_of_the_better_policy_whatever_the_costs(
    w: float,
    a: float,
    latency: float,
    c: float,
    rows: int,
    penalty: float,
    seed: int,
) -> None:
    """Though splitting costs up to 30% more than the model knows, every step is noisy, and some are hiccups."""
    model = costs(w, a, latency, c)
    tokens = 2 * rows
    truth = {1: model.decode.verify.serial(tokens), 2: penalty * model.decode.verify.split(tokens, tokens / 2)}
    random = np.random.default_rng(seed)
    noise = np.exp(random.normal(0, 0.03, 1000)) * np.where(random.random(1000) < 0.01, 5, 1)
    total, _ = run(MicroBatcher("auto", model), truth, noise, rows)
    assert total <= 1.03 * 1000 * min(truth.values())


def test_what_steps_take_is_learnt_both_ways() -> None:
    model = costs(1e-3, 1e-4, 1e-3, 2e-5)
    serial, split = model.decode.verify.serial(64), model.decode.verify.split(64, 32)
    assert 0.7 * serial < split < 0.95 * serial
    batcher = MicroBatcher("auto", model)
    _, first = run(batcher, {1: serial, 2: 1.2 * serial}, np.ones(400), 32)
    assert {each.halves for each in first[-100:] if each.reason is not Reason.TRIAL} == {1}
    assert Reason.NO_GAIN in {each.reason for each in first[-100:]}
    _, then = run(batcher, {1: 2 * serial, 2: 2 * 0.8 * serial}, np.ones(1200), 32)
    assert {each.halves for each in then[-100:] if each.reason is not Reason.TRIAL} == {2}
    gain = [each for each in then if each.reason is Reason.GAIN][-1]
    assert gain.verify_seconds == pytest.approx(2 * 0.8 * serial, rel=0.05)


def test_a_slower_machine_alone_changes_no_decision() -> None:
    model = costs(1e-3, 1e-4, 1e-3, 0.9e-4)
    serial, split = model.decode.verify.serial(64), model.decode.verify.split(64, 32)
    batcher = MicroBatcher("auto", model)
    drift = np.concatenate([np.ones(200), np.full(200, 1.8), np.ones(200)])
    _, decisions = run(batcher, {1: serial, 2: split}, drift, 32)
    assert {each.halves for each in decisions if each.reason is not Reason.TRIAL} == {2}
