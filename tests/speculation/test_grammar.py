"""Masks of grammars: exact after any drafts, whatever was drafted and accepted before."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache

import numpy as np
import pytest
import tokenizers
import tokenizers.models
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sampling import admit, p_value, records, table_of
from xgrammar import GrammarMatcher

from raysonar.demo import TARGET
from raysonar.errors import InvalidRequestError
from raysonar.forms import free, listed, literal, mark, one_of, optional, sequence
from raysonar.grammar import Grammar
from raysonar.model.folder import open_folder
from raysonar.model.tokenizer import Tokenizer
from raysonar.speculation.acceptance import accept, propose
from raysonar.speculation.grammar import GrammarCompiler, GrammarTable, allowed
from raysonar.speculation.sampler import SamplingTable
from raysonar.step import Rule

VOCAB = 2048 + 13
"""More than the tokenizer's: some ids have no token."""
PERSON = Grammar.json_schema(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["a", "bc"]}, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
    }
)
GRAMMARS = [
    PERSON,
    Grammar.json_object(),
    Grammar.regex("[a-c]{2,4}(x|yz)*"),
    Grammar.choice(["yes", "no", "yesterday"]),
    Grammar.ebnf('root ::= "(" root ")" | "."'),
    Grammar.structure(sequence(free(without="<|user|>"), mark("<|user|>"), PERSON.form)),
    Grammar.structure(sequence(optional(mark("<|pad|>")), listed(sequence(literal("ab"), mark("<|user|>")), "\n"))),
    Grammar.structure(one_of(Grammar.regex("x+").form, mark("<|system|>"), Grammar.choice(["yes"]).form)),
]


class _Spelt:
    """A tokenizer of these pieces, the last of which ends a text; some are marks."""

    available = True

    def __init__(self, pieces: list[bytes], marks: Mapping[str, int] | None = None) -> None:
        self.pieces = lambda: list(pieces)
        self.marks = marks or {}
        self.vocab_size, self.eos_token_ids = len(pieces), (len(pieces) - 1,)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(open_folder(TARGET))


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer, VOCAB)


def fresh_mask(grammar: Grammar, tokens: Sequence[int]) -> list[int]:
    """What a matcher of its own allows after these tokens; every id when they are not a beginning, or the end is in."""
    matcher = GrammarMatcher(compiler().compile(grammar))
    for token in tokens:
        if matcher.is_terminated() or not matcher.accept_token(token):
            return list(range(VOCAB))
    if matcher.is_terminated():
        return list(range(VOCAB))
    mask = torch.zeros(1, -(-VOCAB // 32), dtype=torch.int32)
    matcher.fill_next_token_bitmask(mask)
    return allowed(mask, VOCAB)[0].nonzero().flatten().tolist()


def tokens_of(table: GrammarTable, slot: int, seen: list[int]) -> list[int]:
    return allowed(table.masks(np.array([slot], np.int32), [seen]), VOCAB)[0].nonzero().flatten().tolist()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_masks_are_those_of_a_fresh_matcher_whatever_was_drafted_and_accepted(data):
    """Random grammars in random slots; random drafts, good and bad; a random part of them is accepted."""
    table = GrammarTable(VOCAB)
    slots = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3, unique=True))
    grammars = {slot: data.draw(st.sampled_from(GRAMMARS)) for slot in slots}
    known: dict[int, list[int]] = {slot: [] for slot in slots}
    for slot in slots:
        table.admit(slot, compiler().compile(grammars[slot]), [])
    for _ in range(data.draw(st.integers(1, 6))):
        drafts: dict[int, list[int]] = {}
        for slot in slots:
            drafts[slot] = []
            for _ in range(data.draw(st.integers(0, 4))):
                good = fresh_mask(grammars[slot], known[slot] + drafts[slot])
                drafts[slot].append(data.draw(st.sampled_from(good) | st.integers(0, VOCAB - 1)))
            if data.draw(st.booleans()):  # the draft's rounds ask on their way
                for length in range(len(drafts[slot]) + 1):
                    tokens_of(table, slot, drafts[slot][:length])
        rows = [(slot, drafts[slot][:length]) for slot in slots for length in range(len(drafts[slot]) + 1)]
        rows += [(9, []), (9, [3])]  # a slot without a grammar
        masks = allowed(table.masks(np.array([slot for slot, _ in rows], np.int32), [d for _, d in rows]), VOCAB)
        for mask, (slot, seen) in zip(masks, rows, strict=True):
            expected = fresh_mask(grammars[slot], known[slot] + seen) if slot in grammars else list(range(VOCAB))
            assert mask.nonzero().flatten().tolist() == expected
        new = {}
        for slot in slots:
            new[slot] = []
            for token in drafts[slot][: data.draw(st.integers(0, len(drafts[slot])))]:
                if token not in fresh_mask(grammars[slot], known[slot] + new[slot]):
                    break
                new[slot].append(token)
            new[slot].append(data.draw(st.sampled_from(fresh_mask(grammars[slot], known[slot] + new[slot]))))
            known[slot] += new[slot]
        table.accept(np.array([*slots, 9], np.int32), [*(new[slot] for slot in slots), [1, 2]])
    for slot in slots:
        assert tokens_of(table, slot, []) == fresh_mask(grammars[slot], known[slot])
        again = GrammarTable(VOCAB)  # as after a preemption
        again.admit(slot, compiler().compile(grammars[slot]), known[slot])
        assert tokens_of(again, slot, []) == tokens_of(table, slot, [])


def test_a_slot_that_holds_something_else_is_free_of_its_grammar():
    table = table_of(records(2), VOCAB)
    table.constrain(0, compiler().compile(GRAMMARS[3]), [])
    assert table.grammars.cover(np.array([1, 0], np.int32))
    with pytest.raises(ValueError, match="drafts that they have seen"):
        table.rows(np.array([0], np.int32))
    admit(table, [0], records(1))
    assert not table.grammars.cover(np.array([0, 1], np.int32))
    logits = torch.randn(1, VOCAB)
    rows = table.rows(np.array([0], np.int32))
    assert rows.scores(logits, torch.ones(1).long(), torch.zeros(2, 2)) is logits


def test_tokens_accepted_against_the_grammar_are_an_error():
    table = GrammarTable(VOCAB)
    table.admit(0, compiler().compile(Grammar.choice(["yes"])), [])
    with pytest.raises(RuntimeError, match="against the slot's grammar"):
        table.accept(np.array([0], np.int32), [tokenizer().encode("no", add_special_tokens=False)])


def test_no_special_token_and_no_id_without_a_token_is_ever_allowed():
    special = {token for token in range(tokenizer().vocab_size) if tokenizer().is_special(token)}
    assert len(special) > 3
    eos = set(tokenizer().eos_token_ids)
    for grammar, begin in [(Grammar.json_object(), '{"'), (Grammar.regex("(.|\n)*"), ""), (Grammar.regex(".*"), "x")]:
        mask = set(fresh_mask(grammar, tokenizer().encode(begin, add_special_tokens=False)))
        assert len(mask) > 500
        assert not mask & (special - eos)
        assert max(mask) < tokenizer().vocab_size
    assert not eos & set(fresh_mask(Grammar.json_object(), tokenizer().encode('{"', add_special_tokens=False)))


def test_a_mark_is_its_token_and_no_text_is():
    """A special token, and one that is not: neither is in a string, and letters do not make either."""
    pieces = [b"<", b"x", b">", b'"', b"", b"", b""]
    spelt = _Spelt(pieces, {"<x>": 4, "<xx>": 5})
    compiler = GrammarCompiler(lambda: spelt, len(pieces))

    def following(grammar: Grammar, *tokens: int) -> list[int]:
        table = GrammarTable(len(pieces))
        table.admit(0, compiler.compile(grammar), tokens)
        return allowed(table.masks(np.zeros(1, np.int32), [[]]), len(pieces))[0].nonzero().flatten().tolist()

    call = Grammar.structure(sequence(mark("<x>"), Grammar.json_schema({"type": "string"}).form, mark("<xx>")))
    assert following(call) == [4]
    assert following(call, 4) == [3]
    assert following(call, 4, 3) == [0, 1, 2, 3]
    assert following(call, 4, 3, 1, 3) == [5]
    assert following(call, 4, 3, 1, 3, 5) == [6]
    assert following(Grammar.regex("(.|\n)*")) == [0, 1, 2, 3, 6]
    unknown = Grammar.structure(mark("<>"))
    assert following(unknown) == [0]
    assert following(unknown, 0) == [2]
    thought = Grammar.structure(sequence(free(without="<x>"), mark("<x>"), literal("x")))
    assert following(thought, 0, 1) == [0, 1, 3, 4, 5], "its end is one token, not three"
    assert following(thought, 5, 0, 1, 4) == [1]


def test_a_dead_end_allows_the_end_of_the_text():
    """No token spells the b that must follow the a."""
    table, slot = GrammarTable(5), np.zeros(1, np.int32)
    pieces = [b"a", b"c", b"d", b"e", b""]
    compiled = GrammarCompiler(lambda: _Spelt(pieces), 5).compile(Grammar.regex("ab|c"))
    table.admit(0, compiled, [])
    assert allowed(table.masks(slot, [[0]]), 5).tolist() == [[False, False, False, False, True]]
    table.accept(slot, [[0, 4]])
    table.accept(slot, [[4]])
    assert allowed(table.masks(slot, [[]]), 5)[0, 4], "it is still at its end"


def scored(
    table: SamplingTable, slots: list[int], seen: list[list[int]], logits: torch.Tensor, position: int = 3
) -> torch.Tensor:
    rows = table.rows(np.array(slots, np.int32), lambda: seen)
    return rows.scores(logits, torch.full((len(slots),), position), torch.zeros(len(table.rules), 8, dtype=torch.int32))


def test_the_grammar_wins_over_everything_else_that_is_asked_for():
    """logit_bias cannot bring a token back; a ban that would leave nothing is void; nothing becomes NaN."""
    compiled = compiler().compile(Grammar.choice(["yes", "no"]))
    outside = next(t for t in range(10, VOCAB) if t not in fresh_mask(Grammar.choice(["yes", "no"]), []))
    inside = fresh_mask(Grammar.choice(["yes", "no"]), [])
    eos = list(tokenizer().eos_token_ids)
    made = records(2, rule=[Rule.GREEDY, Rule.COUPLED], temperature=0.7, top_p=0.9, top_k=1000, min_p=0.01)
    made["repetition_penalty"], made["presence_penalty"], made["min_length"] = 1.3, 0.5, 100
    table = SamplingTable(2, VOCAB, torch.device("cpu"))
    banned = [(slot, token) for slot in range(2) for token in (*inside, *eos)]
    admit(table, [0, 1], made, bias=[(0, outside, 100.0), (1, outside, 100.0)], banned=banned)
    for slot in range(2):
        table.constrain(slot, compiled, [])
    yes = tokenizer().encode("yes", add_special_tokens=False)
    scores = scored(table, [0, 1, 0, 1], [[], [], yes, yes], torch.randn(4, VOCAB))
    assert not scores.isnan().any()
    for row in (0, 1):
        assert set((scores[row] > -torch.inf).nonzero().flatten().tolist()) <= set(inside)
    for row in (2, 3):  # the text is complete: its end is banned until min_tokens, and chosen all the same
        assert (scores[row] > -torch.inf).nonzero().flatten().tolist() == eos
    free = records(1, min_length=100)
    admit(table, [0], free, banned=[(0, inside[0])])
    table.constrain(0, compiled, [])
    left = (scored(table, [0], [[]], torch.randn(1, VOCAB)) > -torch.inf).nonzero()[:, 1].tolist()
    assert left == inside[1:], "a ban that leaves something to choose holds"


@pytest.mark.parametrize("drafting", ["masked", "free"])
def test_the_output_distribution_is_the_masked_targets_under_the_rejection_rule(drafting: str):
    """Chi-squared of the first token, and of the second where the draft before it was accepted; drafts that keep to the
    grammar, and others."""
    texts = 40_000
    compiled = GrammarCompiler(lambda: _Spelt([b"a", b"b", b"c", b"d", b""]), 5).compile(Grammar.regex("[ab][bcd]"))
    target, draft = torch.tensor([0.3, 1.1, -0.4, 0.2, 2.0]), torch.tensor([1.0, 0.1, 0.7, -0.6, 0.3])
    slots, text = np.arange(texts, dtype=np.int32), torch.zeros(texts, 4, dtype=torch.int32)
    table = table_of(records(texts, rule=Rule.REJECTION), 5)
    for slot in range(texts):
        table.constrain(slot, compiled, [])
    position, logits = torch.ones(texts, dtype=torch.int64), draft.expand(texts, -1)
    rows = table.rows(slots, lambda: [[]] * texts)
    draft_scores = rows.scores(logits, position, text) if drafting == "masked" else logits.clone()
    drafts = propose(rows, draft_scores, position)[:, None]
    seen = [prefix for token in drafts.flatten().tolist() for prefix in ([], [token])]
    verified = table.rows(np.repeat(slots, 2), lambda: seen)
    positions = torch.tensor([1, 2]).repeat(texts)
    scores = verified.scores(target.expand(2 * texts, -1), positions, text)
    count, tokens = accept(verified, scores, positions, drafts, np.ones(texts, np.int32), draft_scores[:, None])
    second = tokens[count == 2, 1]
    assert (set(drafts.flatten().tolist()) <= {0, 1}) == (drafting == "masked")
    assert 0.2 * texts < len(second) < 0.9 * texts
    for drawn, possible in ((tokens[:, 0], [1, 1, 0, 0, 0]), (second, [0, 1, 1, 1, 0])):
        exact = torch.tensor(possible) * target.exp()
        assert p_value(torch.bincount(drawn, minlength=5), exact) > 1e-4


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (Grammar.regex("[a"), "Unclosed"),
        (Grammar.regex("(?=a)b"), "Lookahead"),
        (Grammar.ebnf("root ::= x"), '"x" is not defined'),
        (Grammar.ebnf('start: "a"'), "Unexpected character"),
        (Grammar.ebnf("root ::= root"), "no text that it matches"),
        (Grammar.json_schema({"$ref": "#/$defs/gone"}), "gone"),
        (
            Grammar.json_schema({"type": "string", "minLength": 2, "maxLength": 1}),
            "minLength 2 is greater than maxLength",
        ),
    ],
)
def test_what_does_not_compile_is_refused_with_the_reason_and_the_parameter(grammar: Grammar, words: str):
    grammar = dataclasses.replace(grammar, field="guided_something")
    with pytest.raises(InvalidRequestError, match="guided_something: ") as refused:
        compiler().compile(grammar)
    assert words in str(refused.value)
    assert ".cc:" not in str(refused.value), "a place in a library's sources says nothing to a client"
    assert refused.value.field == "guided_something"


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_choices_are_matched_as_they_are(choices):
    """Quotes, backslashes, line breaks, any character."""
    compiled = compiler().compile(Grammar.choice(choices))
    for choice in choices:
        matcher = GrammarMatcher(compiled)
        assert matcher.accept_string(choice)
        assert matcher.is_completed()
    other = GrammarMatcher(compiled)
    assert not (other.accept_string(choices[0] + "\x01!?") and other.is_completed())


def test_a_model_without_tokenizer_or_end_of_text_is_told_so(tmp_path):
    bare = Tokenizer(tmp_path, None, {})
    with pytest.raises(InvalidRequestError, match="needs a tokenizer"):
        GrammarCompiler(lambda: bare, VOCAB).compile(PERSON)
    endless = Tokenizer(tmp_path, tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a")), {})
    with pytest.raises(InvalidRequestError, match="end-of-sequence"):
        GrammarCompiler(lambda: endless, VOCAB).compile(PERSON)
