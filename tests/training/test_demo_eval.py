"""The evaluation counts right answers by kind and adds up acceptance; the engine is a stand-in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from tokenizers import Tokenizer

from raysonar.training.demo_conversations import Source
from raysonar.training.demo_data import LONG_KINDS
from raysonar.training.demo_eval import Count, Evaluation, sampled, unseen_prompts
from raysonar.training.demo_questions import UNKNOWN


@dataclass(frozen=True)
class Acceptance:
    drafted: tuple[int, ...] = (3, 2)
    accepted: tuple[int, ...] = (2, 1)


@dataclass(frozen=True)
class Result:
    text: str
    token_ids: list[int]
    acceptance: Acceptance | None


class Refusing:
    """An engine that knows nothing and says so."""

    def __init__(self) -> None:
        self.temperatures: list[float] = []

    def generate(self, prompts: list[list[int]], params: dict[str, Any]) -> list[Result]:
        self.temperatures.append(params["temperature"])
        return [Result(UNKNOWN, [1, 2], Acceptance()) for _ in prompts]


@pytest.fixture
def evaluation(tokenizer: Tokenizer) -> Evaluation:
    return Evaluation(Refusing(), dict, tokenizer, 30, 0)


def test_refusing_everything_is_right_only_for_refusals(evaluation: Evaluation) -> None:
    report = evaluation.exact()
    assert report["refusals"] == {"questions": 30, "exact": 1.0}
    assert report["trained"]["exact"] == report["held_out"]["exact"] == 0.0
    assert set(report["held_out_long"]["kinds"]) <= set(LONG_KINDS)
    assert report["acceptance_greedy"]["rates"] == [0.6667, 0.5]


def test_acceptance_is_measured_at_both_temperatures(evaluation: Evaluation) -> None:
    report = evaluation.acceptance()
    assert evaluation.engine.temperatures == [1.0, 0.0, 1.0]
    assert report["acceptance_temperature_1"] == {"rates": [0.6667, 0.5], "drafted": [90, 60]}


def test_speed_counts_the_tokens_of_single_requests(evaluation: Evaluation) -> None:
    assert evaluation.speed(questions=3, rounds=2)["tokens_per_cpu_second_batch_1"] > 0
    assert len(evaluation.engine.temperatures) == 6


def test_counts_of_different_lengths_add_up() -> None:
    count = Count()
    count.add((4,), (1,))
    count.add((2, 2), (2, 1))
    assert count.rates() == [0.5, 0.5]
    assert Count().rates() == []


def test_samples_and_unseen_prompts_are_repeatable(few: Source, tokenizer: Tokenizer) -> None:
    pairs = few.evaluation()["trained"]
    assert sampled(pairs, 5, 1) == sampled(pairs, 5, 1)
    assert sampled(pairs, 0, 1) == pairs
    prompts = unseen_prompts(tokenizer, 4, 0)
    assert prompts == unseen_prompts(tokenizer, 4, 0)
    assert len(prompts) == 4
