"""The demo's questions and answers: enough, clean, repeatable, and honest about what is held out."""

from __future__ import annotations

import re

import pytest

from raysonar.training import demo_questions as q
from raysonar.training.demo_conversations import Source, fill
from raysonar.training.demo_data import ALL_KINDS, KINDS, Fact, cut, load_facts, strip_parentheses


@pytest.fixture(scope="module")
def facts() -> list[Fact]:
    return load_facts()


@pytest.fixture(scope="module")
def source(facts: list[Fact]) -> Source:
    return Source(facts)


def questions(source: Source, epochs: int) -> set[str]:
    return {turn.question for n in range(epochs) for c in source.epoch(n) for turn in c.turns}


def test_enough_facts_of_enough_kinds(facts: list[Fact]) -> None:
    assert len(facts) >= 2000
    assert len({fact.kind for fact in facts}) == len(ALL_KINDS) >= 8
    assert len({(fact.country, fact.kind) for fact in facts}) == len(facts)


def test_answers_are_clean(facts: list[Fact]) -> None:
    for fact in facts:
        assert fact.answer.isascii()
        assert fact.answer == fact.answer.strip()
        assert not re.search(r"\+\+|\best\.|\d est|\bNA\b|\bU[KN]\b|[()\"]|  |\.\.|note", fact.answer), fact
        assert len(fact.answer) < 400


@pytest.mark.parametrize(
    ("country", "kind", "answer"),
    [
        ("France", "capital", "Paris."),
        ("Chad", "languages", "French, Arabic and Sara."),
        ("the United Kingdom", "internet", ".uk"),
        ("Norway", "borders", "Finland, Sweden and Russia."),
        ("Iceland", "borders", "None, it has no land borders."),
        ("Burkina Faso", "independence", "5 August 1960."),
    ],
)
def test_known_answers(facts: list[Fact], country: str, kind: str, answer: str) -> None:
    assert Fact(country, kind, answer) in facts


def test_overview_agrees_with_the_single_answers(facts: list[Fact]) -> None:
    found = {(fact.country, fact.kind): fact.answer for fact in facts}
    overview = found["Chad", "overview"]
    assert all(found["Chad", kind] in overview for kind in ("location", "capital", "languages"))


def test_every_kind_has_phrasings_and_held_out_ones() -> None:
    for kind in ALL_KINDS:
        assert len(q.PHRASINGS[kind]) >= 6
        assert len(q.HELD_OUT[kind]) >= 1
        assert not set(q.PHRASINGS[kind]) & set(q.HELD_OUT[kind])
        assert all("{c}" in template for template in q.PHRASINGS[kind] + q.HELD_OUT[kind])
    assert not set(q.UNTAUGHT) & set(q.UNTAUGHT_HELD_OUT)
    assert not set(q.OFF_TOPIC) & set(q.OFF_TOPIC_HELD_OUT)
    assert not set(q.NOT_COUNTRIES) & set(q.NOT_COUNTRIES_HELD_OUT)


def test_training_never_sees_what_is_held_out(source: Source) -> None:
    asked = {re.sub(r"\W+", " ", question.lower()).strip() for question in questions(source, 3)}
    sets = source.evaluation()
    for name in ("held_out", "held_out_long", "refusals"):
        for pair in sets[name]:
            assert re.sub(r"\W+", " ", pair.question.lower()).strip() not in asked


def test_names_kept_for_evaluation_are_not_invented_again(source: Source) -> None:
    text = "\n".join(questions(source, 3)).lower()
    assert len(set(source.reserved)) == len(source.reserved)
    assert not [name for name in source.reserved if re.search(rf"\b{name.lower()}\b", text)]


def test_epochs_are_repeatable_and_differ(facts: list[Fact], source: Source) -> None:
    again = Source(facts)
    assert again.epoch(3) == source.epoch(3)
    assert source.epoch(3) != source.epoch(4)
    assert Source(facts, seed=1).epoch(3) != source.epoch(3)
    assert again.evaluation() == source.evaluation()


def test_an_epoch_asks_every_fact_once_and_refuses_some(facts: list[Fact], source: Source) -> None:
    conversations = source.epoch(0)
    turns = [turn for conversation in conversations for turn in conversation.turns]
    refused = [turn for turn in turns if turn.answer == q.UNKNOWN]
    talk = {answer for _, answer in q.SMALL_TALK}
    assert sum(turn.answer in talk for turn in turns) > 10
    assert len(turns) - len(refused) - sum(turn.answer in talk for turn in turns) == len(facts)
    assert 0.1 < len(refused) / len(facts) < 0.25
    assert any(len(conversation.turns) > 10 for conversation in conversations)
    assert any(conversation.system for conversation in conversations)


def test_missing_facts_are_refused_not_guessed(facts: list[Fact], source: Source) -> None:
    known = {(fact.country, fact.kind) for fact in facts}
    assert source.missing
    assert not known & set(source.missing)
    assert {kind for _, kind in source.missing} <= set(KINDS)


def test_text_helpers() -> None:
    assert strip_parentheses("a (b (c) d), e (f") == "a, e"
    assert cut("one; two, three", 10) == "one"
    assert cut("one, two", 10) == "one, two"
    assert fill("What's {c}'s flag?", "Honduras") == "What's Honduras' flag?"
    assert fill("What's {c}'s flag?", "Chad") == "What's Chad's flag?"
