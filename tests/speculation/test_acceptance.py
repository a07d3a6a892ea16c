"""The acceptance rules: what is emitted is distributed as the target, whatever the drafts are.

Texts are Markov chains: the target's next token is drawn from a row of one matrix, the draft's from a row of another.
Whole generations run, many texts at once, so that discarded drafts are drawn again with the noise they had.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling import p_value, records, rule_table, table_of
from torch import Tensor

from raysonar.kernels import noise
from raysonar.kernels.noise import Stream
from raysonar.speculation import acceptance
from raysonar.speculation.acceptance import accept, choose, propose
from raysonar.speculation.sampler import SamplingTable
from raysonar.step import Rule

DRAWS = 200_000
LEAST = 1e-4
"""Every figure is fixed by its seeds; a p-value under this is a wrong distribution, not bad luck."""
CERTAIN = 1e-12
"""A wrong rule must show at least this clearly."""

TARGET = torch.tensor(
    [
        [0.30, 0.25, 0.20, 0.15, 0.10, 0.00],
        [0.02, 0.90, 0.02, 0.02, 0.02, 0.02],
        [0.00, 0.00, 0.50, 0.50, 0.00, 0.00],
        [0.16, 0.17, 0.17, 0.16, 0.17, 0.17],
        [0.00, 0.05, 0.00, 0.25, 0.30, 0.40],
        [0.60, 0.20, 0.10, 0.05, 0.04, 0.01],
    ]
)
VOCAB = len(TARGET)
ELSEWHERE = torch.where(TARGET > 0, 0.0, 1.0) + torch.eye(VOCAB)[5]
DRAFTS = {
    "one-hot": torch.eye(VOCAB)[[3, 1, 0, 5, 5, 4]],
    "disjoint": torch.where(ELSEWHERE.sum(1, keepdim=True) > 0, ELSEWHERE, 1.0),
    "uniform": torch.ones(VOCAB, VOCAB),
    "near-equal": TARGET * (1 + 1e-3 * torch.eye(VOCAB)[torch.arange(VOCAB).roll(1)]),
    "equal": TARGET,
    "zeros where the target has mass": torch.where(torch.arange(VOCAB) == TARGET.argmax(1)[:, None], 0.0, 1.0),
    "another text's": TARGET.roll(2, 0),
}
DRAFTS = {name: q / q.sum(1, keepdim=True) for name, q in DRAFTS.items()}


@dataclass
class Generation:
    """texts: [R, >= length]; length: of each text; drafted and accepted: in all, by position in the draft."""

    texts: Tensor
    drafted: Tensor
    accepted: Tensor


def generate(
    table: SamplingTable, target: Tensor, draft: Tensor | None, drafts: int, steps: int, start: int = 0
) -> Generation:
    """Every slot's text from token `start`, `steps` steps on; `draft` None stands for random tokens."""
    count = len(table.rules)
    slots, every = np.arange(count, dtype=np.int32), torch.arange(count)
    texts = torch.full((count, 1 + (drafts + 1) * steps), start)
    length = torch.ones(count, dtype=torch.int64)
    drafted, accepted = torch.zeros(drafts, dtype=torch.int64), torch.zeros(drafts, dtype=torch.int64)
    rows, verified = table.rows(slots), table.rows(np.repeat(slots, drafts + 1))
    random = torch.Generator().manual_seed(drafts)
    for _ in range(steps):
        draft_scores = torch.zeros(count, drafts, len(target))
        for k in range(drafts):
            if draft is None:
                token = torch.randint(0, len(target), (count,), generator=random)
            else:
                draft_scores[:, k] = draft.log()[texts[every, length - 1 + k]]
                token = propose(rows, draft_scores[:, k], length + k)
            texts[every, length + k] = token
        place = length[:, None] + torch.arange(drafts + 1)
        proposed = texts.gather(1, place[:, :-1])
        scores = target.log()[texts.gather(1, place - 1)].flatten(0, 1)
        arguments = (verified, scores, place.flatten(), proposed, np.full(count, drafts, np.int32))
        number, tokens = accept(*arguments, None if draft is None else draft_scores)
        texts.scatter_(1, place, tokens)  # what stands behind the new tokens is overwritten by the next step
        length += number
        drafted += count
        accepted += (number[:, None] > torch.arange(1, drafts + 1)).sum(0)
    return Generation(texts, drafted, accepted)


def marginals(target: Tensor, positions: int, start: int = 0) -> list[Tensor]:
    """The exact distribution of the token at positions 1, 2, ..."""
    now, every = torch.eye(len(target), dtype=torch.float64)[start], []
    for _ in range(positions):
        now = now @ target.double()
        every.append(now)
    return every


def worst_p_value(texts: Tensor, target: Tensor, positions: int) -> float:
    """The least of the chi-squared tests of every position, and of every two consecutive positions' joint."""
    vocab, exact = len(target), marginals(target, positions)
    values = []
    for i, marginal in enumerate(exact, 1):
        values.append(p_value(torch.bincount(texts[:, i], minlength=vocab), marginal))
        if i < positions:
            pair = texts[:, i] * vocab + texts[:, i + 1]
            values.append(p_value(torch.bincount(pair, minlength=vocab**2), marginal[:, None] * target.double()))
    return min(values)


@pytest.mark.parametrize(
    ("kind", "drafts"), [(kind, 4) for kind in DRAFTS] + [("another text's", drafts) for drafts in (1, 2, 3)]
)
def test_rejection_emits_the_targets_distribution_at_every_position(kind, drafts):
    table = rule_table(Rule.REJECTION, DRAWS, VOCAB, first_seed=1_000_000 * drafts)
    made = generate(table, TARGET, DRAFTS[kind], drafts, steps=4)
    assert worst_p_value(made.texts, TARGET, positions=4) > LEAST
    assert (made.drafted == 4 * DRAWS).all()


@pytest.mark.parametrize("kind", DRAFTS)
def test_rejection_accepts_as_often_as_the_distributions_overlap(kind):
    """alpha = sum of min(p, q) (2211.17192, corollary 3.6), of the first draft and, given it, of the second."""
    made = generate(rule_table(Rule.REJECTION, DRAWS, VOCAB), TARGET, DRAFTS[kind], drafts=2, steps=1)
    overlap = torch.minimum(TARGET, DRAFTS[kind]).double()
    both = overlap[0] @ overlap.sum(1)
    for accepted, share in zip(made.accepted.tolist(), (overlap[0].sum().item(), both.item()), strict=True):
        assert abs(accepted / DRAWS - share) <= 5 * (share * max(1 - share, 0) / DRAWS) ** 0.5 + 2e-6


@pytest.mark.parametrize("shared", ["recovery with the draft's", "acceptance with the draft's"])
def test_the_chi_squared_test_sees_noise_that_is_used_twice(shared, monkeypatch):
    """The tests above can fail: a rule that reuses the draft's noise is biased, and they say so."""
    streams = {"TARGET": Stream.TARGET, "ACCEPT": Stream.ACCEPT}
    streams["TARGET" if "recovery" in shared else "ACCEPT"] = Stream.DRAFT
    monkeypatch.setattr(acceptance, "Stream", SimpleNamespace(**streams))
    made = generate(rule_table(Rule.REJECTION, DRAWS, VOCAB), TARGET, DRAFTS["uniform"], drafts=1, steps=2)
    assert worst_p_value(made.texts, TARGET, positions=2) < CERTAIN


def test_the_chi_squared_test_sees_a_rule_that_accepts_every_possible_draft(monkeypatch):
    eager = SimpleNamespace(uniform=lambda key, *_: torch.zeros(len(key), 1), gumbel=noise.gumbel)
    monkeypatch.setattr(acceptance, "noise", eager)
    made = generate(rule_table(Rule.REJECTION, DRAWS, VOCAB), TARGET, DRAFTS["uniform"], drafts=1, steps=2)
    assert worst_p_value(made.texts, TARGET, positions=2) < CERTAIN


@pytest.mark.parametrize("drafts", [1, 4])
def test_a_draft_equal_to_the_target_is_always_accepted(drafts):
    """Under both rules that draw; the bound u < 1 makes it exact."""
    for rule in (Rule.REJECTION, Rule.COUPLED, Rule.GREEDY):
        made = generate(rule_table(rule, 20_000, VOCAB), TARGET, TARGET, drafts, steps=2)
        assert torch.equal(made.accepted, made.drafted)


def test_coupled_text_does_not_depend_on_the_drafts():
    """For seeded requests: no drafts, good ones, bad ones and random ones give the same text, the target's."""
    plain = generate(rule_table(Rule.COUPLED, DRAWS, VOCAB, first_seed=7), TARGET, None, drafts=0, steps=5).texts
    assert worst_p_value(plain, TARGET, positions=5) > LEAST
    table = rule_table(Rule.COUPLED, 20_000, VOCAB, first_seed=7)
    for draft, drafts in [(None, 1), (None, 4), (DRAFTS["another text's"], 2), (DRAFTS["one-hot"], 3)]:
        made = generate(table, TARGET, draft, drafts, steps=5)
        assert torch.equal(made.texts[:, :6], plain[:20_000])
        assert 0 < made.accepted[0] < made.drafted[0]


def test_greedy_text_is_the_targets_argmax():
    table = rule_table(Rule.GREEDY, 50, VOCAB)
    plain = generate(table, TARGET, None, drafts=0, steps=6, start=4).texts
    token, expected = 4, [4]
    for _ in range(6):
        token = int(TARGET[token].argmax())
        expected.append(token)
    assert plain.tolist() == [expected] * 50
    for draft, drafts in [(None, 1), (None, 4), (DRAFTS["another text's"], 2), (TARGET, 3)]:
        assert torch.equal(generate(table, TARGET, draft, drafts, steps=6, start=4).texts[:, :7], plain)


def test_an_unseeded_texts_draws_without_drafts_are_the_targets():
    made = generate(rule_table(Rule.REJECTION, DRAWS, VOCAB), TARGET, None, drafts=0, steps=3)
    assert worst_p_value(made.texts, TARGET, positions=3) > LEAST


@dataclass
class Call:
    """The arguments of one `accept`, and which logit rows are whose."""

    table: SamplingTable
    slots: np.ndarray
    scores: Tensor
    positions: Tensor
    drafts: Tensor
    draft_count: np.ndarray
    draft_scores: Tensor

    def part(self, texts: list[int], width: int | None = None) -> tuple[Tensor, Tensor]:
        """`accept` on some of the texts, in this order."""
        first = np.cumsum(self.draft_count + 1) - (self.draft_count + 1)
        index = np.concatenate([first[text] + np.arange(self.draft_count[text] + 1) for text in texts])
        count = self.draft_count[texts]
        width = count.max() if width is None else width
        return accept(
            self.table.rows(np.repeat(self.slots[texts], count + 1)),
            self.scores[index],
            self.positions[index],
            self.drafts[texts, :width],
            count,
            self.draft_scores[texts, :width],
        )


def ragged_call(texts: int, vocab: int, seed: int, most: int = 4) -> Call:
    """Texts of all rules with 0 to `most` drafts each; drafts are proposed where the scores say so."""
    random = np.random.default_rng(seed)
    draft_count = random.integers(0, most + 1, texts).astype(np.int32)
    table = table_of(
        records(texts, rule=random.integers(0, 3, texts), seed=random.integers(-(2**62), 2**62, texts)), vocab
    )
    slots = random.permutation(texts).astype(np.int32)
    scores = torch.from_numpy(random.normal(0, 1, (draft_count.sum() + texts, vocab)).astype(np.float32))
    start = torch.from_numpy(random.integers(1, 100, texts))
    rows_of = np.repeat(np.arange(texts), draft_count + 1)
    first = np.cumsum(draft_count + 1) - (draft_count + 1)
    offset = np.arange(len(rows_of)) - first[rows_of]
    draft_scores = torch.zeros(texts, most, vocab)
    drafts = torch.full((texts, most), -1)
    for k in range(most):
        some = np.flatnonzero(draft_count > k)
        if some.size:
            draft_scores[some, k] = scores[first[some] + k] + 0.5 * torch.randn(
                len(some), vocab, generator=torch.Generator().manual_seed(seed + k)
            )
            drafts[some, k] = propose(table.rows(slots[some]), draft_scores[some, k], start[some] + k)
    positions = start[rows_of] + torch.from_numpy(offset)
    return Call(table, slots, scores, positions, drafts, draft_count, draft_scores)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 9), st.sampled_from([5, 37, 1000]))
def test_a_texts_outcome_does_not_depend_on_the_texts_beside_it(seed, texts, vocab):
    """Alone, or among others of other rules and more drafts, in any order: the same count and tokens, to the bit."""
    call = ragged_call(texts, vocab, seed)
    order = np.random.default_rng(seed).permutation(texts).tolist()
    counts, tokens = call.part(order, width=4)
    assert tokens.shape == (texts, 5)
    for i, text in enumerate(order):
        alone_count, alone_tokens = call.part([text])
        kept = int(alone_count[0])
        assert counts[i] == kept <= call.draft_count[text] + 1
        assert torch.equal(tokens[i, :kept], alone_tokens[0, :kept])
        assert torch.equal(tokens[i, : kept - 1], call.drafts[text, : kept - 1])


def test_ragged_calls_accept_and_refuse_every_number_of_drafts():
    """So the property above is about something."""
    call = ragged_call(600, 5, seed=1)
    counts, _ = call.part(list(range(600)), width=4)
    for rule in Rule:
        whose = call.table.rules[call.slots] == rule
        assert {(d, c) for d, c in zip(call.draft_count[whose], counts.numpy()[whose], strict=True)} == {
            (drafted, count) for drafted in range(5) for count in range(1, drafted + 2)
        }


def test_texts_without_drafts_get_the_targets_choice():
    """Also as the only ones of a call that has room for drafts."""
    table = table_of(records(3, rule=[0, 1, 2]), 9)
    rows = table.rows(np.arange(3, dtype=np.int32))
    scores, positions = torch.randn(3, 9, generator=torch.Generator().manual_seed(3)), torch.tensor([4, 5, 6])
    expected = choose(rows, scores, positions)
    for width in (0, 2):
        drafts, none = torch.full((3, width), -1), np.zeros(3, np.int32)
        count, tokens = accept(rows, scores, positions, drafts, none)
        assert count.tolist() == [1, 1, 1]
        assert tokens.shape == (3, width + 1)
        assert torch.equal(tokens[:, 0], expected)


def test_a_greedy_texts_drafts_ask_no_draft_scores_of_the_unseeded_text_beside_it():
    """A decode row with drafts and another text's last prefill row in one step."""
    table = table_of(records(2, rule=[Rule.GREEDY, Rule.REJECTION]), 4)
    scores = torch.tensor([[0.0, 1, 0, 0], [0, 0, 1, 0], [1, 1, 0, 0]])
    rows, positions = table.rows(np.array([0, 0, 1], np.int32)), torch.tensor([5, 6, 9])
    count, tokens = accept(rows, scores, positions, torch.tensor([[1], [-1]]), np.array([1, 0], np.int32))
    assert count.tolist() == [2, 1]
    assert tokens[0].tolist() == [1, 2]
    assert tokens[1, 0] == choose(rows, scores, positions)[2]


def test_a_step_without_texts_is_a_step():
    """A rank without rows runs the same calls."""
    rows = rule_table(Rule.GREEDY, 1, 4).rows(np.empty(0, np.int32))
    scores, none = torch.empty(0, 4), torch.empty(0, dtype=torch.int64)
    assert propose(rows, rows.scores(scores, none, torch.zeros(1, 8)), none).shape == (0,)
    count, tokens = accept(rows, scores, none, torch.empty(0, 2, dtype=torch.int64), np.empty(0, np.int32))
    assert count.shape == (0,)
    assert tokens.shape == (0, 3)


def test_equal_scores_are_settled_by_the_lower_token():
    rows = rule_table(Rule.GREEDY, 2, 5).rows(np.arange(2, dtype=np.int32))
    scores = torch.tensor([[0.0, 1, 1, 0, 1], [2, 2, 2, 2, 2]])
    assert choose(rows, scores, torch.ones(2).long()).tolist() == [1, 0]


def test_a_draft_outside_the_targets_support_is_refused_and_never_drawn():
    table = rule_table(Rule.REJECTION, 5000, 4)
    slots = np.repeat(np.arange(5000, dtype=np.int32), 2)
    target = torch.tensor([-torch.inf, 0.0, -torch.inf, 1.0]).repeat(10_000, 1)
    draft = torch.tensor([0.0, -torch.inf, -torch.inf, -torch.inf]).repeat(5000, 1)
    positions = torch.tensor([3, 4]).repeat(5000)
    drafts = propose(table.rows(slots[::2]), draft, positions[::2])
    count, tokens = accept(
        table.rows(slots), target, positions, drafts[:, None], np.ones(5000, np.int32), draft[:, None]
    )
    assert (drafts == 0).all()
    assert (count == 1).all()
    assert set(tokens[:, 0].tolist()) == {1, 3}


def test_a_draft_refused_by_rounding_alone_is_replaced_from_the_target(monkeypatch):
    """p <= q everywhere, by rounding: nothing is left of p - q, and the largest uniform refuses the draft."""
    largest = 1 - 2.0**-24
    unlucky = SimpleNamespace(uniform=lambda key, *_: torch.full((len(key), 1), largest), gumbel=noise.gumbel)
    monkeypatch.setattr(acceptance, "noise", unlucky)
    random = torch.Generator().manual_seed(5)
    target = torch.randn(4000, 3, generator=random)
    draft = target + torch.rand(4000, 1, generator=random)
    target[:, 0], draft[:, 0] = -torch.inf, -torch.inf
    p, q = target.softmax(1), draft.softmax(1)
    drafts = (q - p).argmax(1)
    empty = (p <= q).all(1) & (largest * q < p).logical_not().gather(1, drafts[:, None]).squeeze(1)
    assert 10 < empty.sum() < 4000
    target, draft, drafts = target[empty], draft[empty], drafts[empty]
    texts = len(drafts)
    table = rule_table(Rule.REJECTION, texts, 3)
    count, tokens = accept(
        table.rows(np.repeat(np.arange(texts, dtype=np.int32), 2)),
        target.repeat_interleave(2, 0),
        torch.ones(2 * texts).long(),
        drafts[:, None],
        np.ones(texts, np.int32),
        draft[:, None],
    )
    assert (count == 1).all()
    assert set(tokens[:, 0].tolist()) <= {1, 2}


def test_rejection_without_the_drafts_scores_is_an_error():
    rows = rule_table(Rule.REJECTION, 1, 4).rows(np.zeros(2, np.int32))
    with pytest.raises(ValueError, match="need the scores their drafts were proposed by"):
        accept(rows, torch.zeros(2, 4), torch.tensor([1, 2]), torch.zeros(1, 1).long(), np.ones(1, np.int32))
