"""Scores against a slow reference that treats one row at a time, and against transformers where it defines the same."""

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from support.sampling import admit, records, table_of
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from raysonar.speculation.sampler import SamplingTable
from raysonar.step import Rule

CPU = torch.device("cpu")
NEAR = 1e-5
"""A reference in float64 cannot say on which side of a limit float32 falls when it is nearer than this."""


class Undecidable(Exception):
    """A value stands too near a limit for the reference to judge."""


def decide(clear):
    if not clear:
        raise Undecidable


@dataclass
class Row:
    """One logit row and its slot's parameters."""

    logits: list[float]
    text: list[int]
    prompt_tokens: int
    rule: Rule = Rule.REJECTION
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    repetition: float = 1.0
    min_length: int = 0
    bias: dict[int, float] = field(default_factory=dict)
    banned: list[int] = field(default_factory=list)


def reference_scores(row: Row) -> np.ndarray:
    """In plain Python, token by token; scores rounded to float32 as they go. Raises Undecidable."""
    one = np.float32
    scores = [one(value) for value in row.logits]
    for token, value in row.bias.items():
        scores[token] += one(value)
    if len(row.text) < row.min_length:
        for token in row.banned:
            scores[token] = one(-np.inf)
    answer = row.text[row.prompt_tokens :]
    for token in range(len(scores)):
        if token in row.text:
            repetition = one(row.repetition)
            scores[token] = scores[token] / repetition if scores[token] > 0 else scores[token] * repetition
        scores[token] = scores[token] - one(row.frequency) * one(answer.count(token))
        scores[token] = scores[token] - one(row.presence) * one(token in answer)
    if row.rule == Rule.GREEDY:
        return np.array(scores)
    scores = [score / one(row.temperature) for score in scores]
    if row.min_p:
        least = float(max(scores)) + math.log(row.min_p)
        decide(all(abs(score - least) > NEAR for score in scores))
        scores = [score if score >= least else one(-np.inf) for score in scores]
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    kept = [token for token in order[: row.top_k or None] if scores[token] > -np.inf]
    if row.top_p < 1:
        weights = [math.exp(float(scores[token]) - float(scores[order[0]])) for token in kept]
        before = [math.fsum(weights[:i]) / math.fsum(weights) for i in range(len(kept))]
        decide(all(abs(mass - row.top_p) > NEAR for mass in before))
        kept = [token for token, mass in zip(kept, before, strict=True) if mass < row.top_p]
    return np.array([score if token in kept else one(-np.inf) for token, score in enumerate(scores)])


def scores_of(rows: list[Row], vocab: int) -> torch.Tensor:
    """All rows in one call; slot i, admitted out of order, is row i's."""
    count, length = len(rows), max(len(row.text) for row in rows) + 2
    made = records(
        count,
        rule=[row.rule for row in rows],
        temperature=[row.temperature for row in rows],
        top_k=[row.top_k for row in rows],
        top_p=[row.top_p for row in rows],
        min_p=[row.min_p for row in rows],
        presence_penalty=[row.presence for row in rows],
        frequency_penalty=[row.frequency for row in rows],
        repetition_penalty=[row.repetition for row in rows],
        min_length=[row.min_length for row in rows],
        prompt_tokens=[row.prompt_tokens for row in rows],
    )
    table = SamplingTable(count, vocab, CPU)
    bias = [(slot, token, value) for slot, row in enumerate(rows) for token, value in row.bias.items()]
    banned = [(slot, token) for slot, row in enumerate(rows) for token in row.banned]
    admit(table, range(count - 1, -1, -1), made[::-1], bias, banned)
    tokens = torch.full((count, length), vocab - 1, dtype=torch.int32)  # what stands after a text is never read
    for slot, row in enumerate(rows):
        tokens[slot, : len(row.text)] = torch.tensor(row.text, dtype=torch.int32)
    logits = torch.tensor([row.logits for row in rows], dtype=torch.float32)
    kept = logits.clone()
    positions = torch.tensor([len(row.text) for row in rows])
    scores = table.rows(np.arange(count, dtype=np.int32)).scores(logits, positions, tokens)
    assert torch.equal(logits, kept)
    return scores


@st.composite
def a_row(draw, vocab):
    """Logits on a coarse grid, so that ties are common; each parameter off half of the time."""

    def maybe(off, values):
        return draw(st.just(off) | values)

    token = st.integers(0, vocab - 1)
    text = draw(st.lists(token, min_size=1, max_size=12))
    return Row(
        logits=draw(st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=vocab, max_size=vocab)),
        text=text,
        prompt_tokens=draw(st.integers(1, len(text))),
        rule=draw(st.sampled_from(Rule)),
        temperature=maybe(1.0, st.sampled_from([0.3, 0.7, 1.5])),
        top_k=maybe(0, st.integers(1, vocab + 3)),
        top_p=maybe(1.0, st.floats(0.01, 0.99)),
        min_p=maybe(0.0, st.floats(0.01, 1.0)),
        presence=maybe(0.0, st.floats(-2, 2)),
        frequency=maybe(0.0, st.floats(-2, 2)),
        repetition=maybe(1.0, st.floats(0.2, 3)),
        min_length=draw(st.integers(0, 14)),
        bias=draw(st.dictionaries(token, st.floats(-100, 100), max_size=4)),
        banned=draw(st.lists(token, max_size=3, unique=True)),
    )


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_scores_are_the_references(data):
    vocab = data.draw(st.sampled_from([5, 7, 16]))
    rows = data.draw(st.lists(a_row(vocab), min_size=1, max_size=5))
    scores = scores_of(rows, vocab).numpy()
    try:
        expected = np.stack([reference_scores(row) for row in rows])
    except Undecidable:
        reject()
    np.testing.assert_array_equal(scores, expected)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_rows_scores_do_not_depend_on_the_rows_beside_it(data):
    vocab = data.draw(st.sampled_from([5, 33]))
    rows = data.draw(st.lists(a_row(vocab), min_size=2, max_size=6))
    together = scores_of(rows, vocab)
    for i, row in enumerate(rows):
        assert torch.equal(scores_of([row], vocab)[0], together[i])


@pytest.mark.parametrize("top_k", [0, 1, 128, 299])
@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_truncation_of_a_wide_vocabulary_with_ties(top_k, top_p):
    generator = np.random.default_rng(top_k)
    logits = (generator.normal(0, 2, 300) * 8).round() / 8
    row = Row(logits=logits.tolist(), text=[0], prompt_tokens=1, top_k=top_k, top_p=top_p)
    found = scores_of([row], 300)[0].numpy()
    np.testing.assert_array_equal(found, reference_scores(row))
    if top_k and top_p == 1:
        assert np.isfinite(found).sum() == top_k


@pytest.mark.parametrize("seed", range(8))
def test_scores_equal_those_of_transformers(seed):
    """Its processors in the order of generate(), which is ours but for min_p: it truncates by min_p last."""
    generator = torch.Generator().manual_seed(seed)
    vocab, prompt, length, fewest = 500, 6, 11, 8 if seed % 2 else 3
    logits = torch.randn(1, vocab, generator=generator)
    text = torch.randint(0, 40, (1, length), generator=generator)
    table = SamplingTable(1, vocab, CPU)
    made = records(1, rule=Rule.REJECTION, temperature=0.8, repetition_penalty=1.3, prompt_tokens=prompt)
    made["min_length"] = prompt + fewest
    choice = [{"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 200, "top_p": 0.7}][seed % 4]
    for name, value in choice.items():
        made[name] = value
    admit(table, [0], made, banned=[(0, 2), (0, 9)])
    processors = LogitsProcessorList(
        [
            MinNewTokensLengthLogitsProcessor(prompt, fewest, [2, 9], device="cpu"),
            RepetitionPenaltyLogitsProcessor(1.3),
            TemperatureLogitsWarper(0.8),
        ]
    )
    kinds = {"top_k": TopKLogitsWarper, "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    processors += [kinds[name](value) for name, value in choice.items()]
    found = table.rows(np.zeros(1, np.int32)).scores(logits, torch.tensor([length]), text)
    expected = processors(text, logits.clone())
    assert 1 < expected.isfinite().sum() < vocab - 2
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_each_verified_position_sees_the_drafts_before_it():
    """Three logit rows of one slot: the penalty, the ban and the count of repeats follow the position."""
    table = SamplingTable(3, 6, CPU)
    made = records(1, frequency_penalty=1.0, prompt_tokens=2, min_length=4)
    admit(table, [1], made, banned=[(1, 5)])
    tokens = torch.tensor([[0] * 6, [3, 3, 1, 1, 2, 4], [0] * 6])
    rows = table.rows(np.array([1, 1, 1], np.int32))
    scores = rows.scores(torch.zeros(3, 6), torch.tensor([3, 4, 5]), tokens)
    assert scores.tolist() == [[0, -1, 0, 0, 0, -math.inf], [0, -2, 0, 0, 0, 0], [0, -2, -1, 0, 0, 0]]


def test_rows_that_need_nothing_get_their_logits_back():
    table = SamplingTable(3, 6, CPU)
    made = records(3, rule=[Rule.GREEDY, Rule.COUPLED, Rule.REJECTION])
    made["top_k"][0], made["top_p"][0], made["min_p"][0] = 3, 0.5, 0.5  # these leave a greedy choice alone
    admit(table, [0, 1, 2], made)
    logits = torch.randn(3, 6, generator=torch.Generator().manual_seed(0))
    assert table.rows(np.arange(3, dtype=np.int32)).scores(logits, torch.ones(3).long(), torch.zeros(3, 2)) is logits
    empty = torch.empty(0, 6)
    assert table.rows(np.empty(0, np.int32)).scores(empty, torch.empty(0).long(), torch.zeros(3, 2)) is empty


def test_admission_forgets_all_that_the_slot_had():
    """And leaves the slots beside it as they were."""
    table = SamplingTable(2, 4, CPU)
    heavy = records(2, rule=Rule.COUPLED, temperature=0.5, frequency_penalty=1.0, min_length=9, top_k=2)
    extras = [(slot, token, 1.0 + token) for slot in (0, 1) for token in (1, 2)]
    admit(table, [0, 1], heavy, bias=extras, banned=[(0, 3), (1, 3)])
    tokens, positions, logits = torch.ones(2, 3, dtype=torch.int32), torch.tensor([2, 2]), torch.zeros(2, 4)
    before = table.rows(np.array([0, 1], np.int32)).scores(logits, positions, tokens)
    assert torch.equal(before[0], before[1])
    admit(table, [0], records(1, rule=Rule.GREEDY))
    after = table.rows(np.array([0, 1], np.int32)).scores(logits, positions, tokens)
    assert after[0].tolist() == [0, 0, 0, 0]
    assert torch.equal(after[1], before[1])
    admit(table, [0], records(1), bias=[(0, 0, 5.0)])
    again = table.rows(np.array([0, 1], np.int32)).scores(logits, positions, tokens)
    assert again[0].tolist() == [5, 0, 0, 0]


@pytest.mark.parametrize("token", [-1, 4])
def test_tokens_outside_the_vocabulary_are_refused(token):
    table = SamplingTable(1, 4, CPU)
    with pytest.raises(ValueError, match=f"tokens must be from 0 to 3, got {token}"):
        admit(table, [0], records(1), bias=[(0, token, 1.0)])
    with pytest.raises(ValueError, match=f"tokens must be from 0 to 3, got {token}"):
        admit(table, [0], records(1), banned=[(0, token)])


def test_the_likeliest_token_is_always_kept():
    """However small top_p, and however large the logits."""
    made = records(3, rule=Rule.REJECTION, top_p=1e-6, min_p=[0, 1, 0], top_k=[0, 0, 1])
    logits = torch.tensor([[0.0, 9e4, 9e4, -9e4]]).repeat(3, 1)
    scores = (
        table_of(made, 4).rows(np.arange(3, dtype=np.int32)).scores(logits, torch.ones(3).long(), torch.zeros(3, 2))
    )
    assert scores.isfinite().tolist() == [[False, True, False, False]] * 3
