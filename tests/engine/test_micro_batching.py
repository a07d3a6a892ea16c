"""Engines measure what their layers take, decide step by step, and say why; the text never depends on it."""

from collections import Counter
from itertools import product
from typing import Any

import pytest

from raysonar import Engine, SamplingParams
from raysonar.demo import TARGET
from raysonar.errors import ConfigurationError
from raysonar.observe.steps import Reason

PROMPTS = [list(range(5 + row, 25 + row)) for row in range(6)]


def engine(**options: Any) -> Engine:
    settings = {"dtype": "float32", "threads": 1, "max_running": 4, "max_model_len": 96, "token_budget": 64, **options}
    return Engine.from_folder(TARGET, **settings)


def answer(made: Engine) -> list[list[int]]:
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    return [result.token_ids for result in made.generate(PROMPTS, params)]


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("tensor", "data", "k"), [(1, 2, 1), (2, 1, 3), (2, 1, 0)])
def test_an_engine_profiles_itself_and_any_policy_gives_the_same_text(tensor: int, data: int, k: int) -> None:
    with engine(speculative_tokens=k) as alone:
        expected = answer(alone)
    with engine(tensor_parallel=tensor, data_parallel=data, speculative_tokens=k) as made:
        assert made.micro_batching == "auto"
        texts = [answer(made)]
        for policy, halves in (("always", 2), ("never", 1)):
            made.micro_batching = policy
            texts.append(answer(made))
            last = made.steps.last(3)
            assert [(record.halves, record.reason) for record in last] == [(halves, Reason.CONFIGURED)] * 3
        records, stats, costs = made.steps.last(), made.stats(), made.costs
    assert texts == [expected] * 3
    assert {record.reason for record in records} <= set(Reason) - {Reason.NOT_PROFILED}
    assert all((record.predicted_seconds or 0) > 0 for record in records)
    assert stats.pages_free == stats.pages
    assert stats.decisions.reasons == Counter(record.reason for record in records)
    assert stats.decisions.predicted_seconds == pytest.approx(sum(record.predicted_seconds or 0 for record in records))
    assert stats.decisions.measured_seconds == pytest.approx(
        sum(record.verify_seconds + record.draft_seconds for record in records)
    )
    assert costs is not None
    for step, name in product((costs.decode, costs.prefill), ("verify", "draft")):
        passes = getattr(step, name)
        if name == "draft" and k == 0:
            assert passes is None
            continue
        counts = {kind: count for kind, (count, _) in passes.layers.items()}
        assert counts == ({"experts": 5, "dense": 1} if name == "verify" else {"experts": 1})
        experts = passes.layers["experts"][1]
        assert min(experts.compute.seconds) > 0
        assert min(experts.communication.seconds) > 0
        assert experts.compute.tokens == ((1 + k, 2 + 2 * k, 4 + 4 * k) if step is costs.decode else (16, 64))
        if name == "verify":
            assert max(passes.layers["dense"][1].communication.seconds) == 0
            assert set(step.tried) == {1, 2}


def test_one_rank_has_nothing_to_hide_and_says_so() -> None:
    with engine() as alone:
        answer(alone)
        records = alone.steps.last()
        assert alone.costs is None
    assert {(record.halves, record.reason, record.predicted_seconds) for record in records} == {
        (1, Reason.NOT_PROFILED, None)
    }


def test_auto_cannot_be_asked_of_an_engine_that_has_measured_nothing() -> None:
    with engine(micro_batching="never") as made:
        made.micro_batching = "always"
        with pytest.raises(ConfigurationError, match="measured when an engine starts with it"):
            made.micro_batching = "auto"
        assert made.micro_batching == "always"


def test_an_unknown_policy_is_refused() -> None:
    with engine(micro_batching="never") as made:
        with pytest.raises(ConfigurationError, match="'sometimes' is none of auto, never, always"):
            made.micro_batching = "sometimes"  # type: ignore[assignment]
        assert made.micro_batching == "never"
