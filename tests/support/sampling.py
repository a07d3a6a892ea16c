"""Sampling tables for tests, and a chi-squared test."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from raysonar.speculation.sampler import SamplingTable
from raysonar.step import SAMPLING, Rule


def records(count: int, **values: ArrayLike) -> NDArray[Any]:
    """SAMPLING [count], everything off but for `values`; GREEDY, seeds 0, 1, 2, ..."""
    made = np.zeros(count, SAMPLING)
    for name, value in {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0, "seed": np.arange(count)}.items():
        made[name] = value
    for name, value in values.items():
        made[name] = value
    return made


def admit(
    table: SamplingTable,
    slots: Sequence[int],
    made: NDArray[Any],
    bias: Sequence[tuple[int, int, float]] = (),
    banned: Sequence[tuple[int, int]] = (),
) -> None:
    """Admit with (slot, token, value) and (slot, token) tuples."""
    table.admit(
        np.array(slots, np.int32),
        made,
        np.array([slot for slot, _, _ in bias], np.int32),
        np.array([token for _, token, _ in bias], np.int32),
        np.array([value for _, _, value in bias], np.float32),
        np.array([slot for slot, _ in banned], np.int32),
        np.array([token for _, token in banned], np.int32),
    )


def table_of(made: NDArray[Any], vocab: int) -> SamplingTable:
    """One slot a record."""
    table = SamplingTable(len(made), vocab, torch.device("cpu"))
    admit(table, range(len(made)), made)
    return table


def rule_table(rule: Rule, count: int, vocab: int, first_seed: int = 0) -> SamplingTable:
    """`count` slots under one rule, with consecutive seeds."""
    return table_of(records(count, rule=rule, seed=first_seed + np.arange(count)), vocab)


def p_value(counts: ArrayLike, probabilities: ArrayLike) -> float:
    """Of the chi-squared test that `counts` are draws from `probabilities`; 0 if one of probability 0 was drawn."""
    seen, expected = np.asarray(counts, np.float64).ravel(), np.asarray(probabilities, np.float64).ravel()
    possible = expected > 0
    if seen[~possible].any():
        return 0.0
    share = expected[possible] / expected.sum()
    return float(stats.chisquare(seen[possible], share * seen.sum()).pvalue)
