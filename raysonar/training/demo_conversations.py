"""Training conversations and evaluation questions, drawn from the facts with seeded randomness.

Every epoch asks each fact once in a random phrasing, with refusals and small talk in between, and joins some
of the pairs to conversations of several turns, so that the model neither depends on one wording nor on an empty
history.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from raysonar.training import demo_questions as q
from raysonar.training.demo_data import ALL_KINDS, KINDS, LONG_KINDS, Fact


@dataclass(frozen=True)
class Pair:
    """One question with its answer."""

    question: str
    answer: str


@dataclass(frozen=True)
class Conversation:
    """Turns after an optional system message."""

    turns: tuple[Pair, ...]
    system: str | None = None


def fill(template: str, country: str) -> str:
    """The phrasing with its country; names that end in s take a bare apostrophe."""
    if country.endswith("s"):
        template = template.replace("{c}'s", "{c}'")
    return template.replace("{c}", country)


def roughen(question: str, rng: random.Random) -> str:
    """As people type: lower case, no final mark, a `please`."""
    roll = rng.random()
    if roll < 0.06:
        question = rng.choice(["Hi, ", "Hello! ", "Please: ", "hey, ", "Question: "]) + question
    elif roll < 0.10 and question.endswith("?"):
        question = question[:-1] + ", please?"
    elif roll < 0.12 and question[-1] in "?.":
        question += rng.choice([" Thanks!", " Thank you.", " I need it for school.", " Be brief."])
    if rng.random() < 0.15:
        question = question.lower()
    elif question[0].islower() and rng.random() < 0.5:
        question = question[0].upper() + question[1:]
    if rng.random() < 0.12:
        question = question.rstrip("?.")
    return question


def invented_name(rng: random.Random) -> str:
    """A country that does not exist."""
    parts = [rng.choice(q.STARTS), rng.choice(q.MIDDLES)]
    for ending in [q.MIDDLES] * rng.choice([0, 1, 1, 2]) + [q.ENDS]:
        joint = rng.choice(q.JOINTS) if "".join(parts)[-1] in "aeiou" or rng.random() < 0.1 else ""
        parts += [joint, rng.choice(ending)]
    name = "".join(parts)
    prefix = rng.choice(["", "", "", "", "", "the ", "North ", "South ", "New ", "Saint ", "the Republic of "])
    return prefix + name + rng.choice(["", "", "", "", "", " Islands"])


class Source:
    """All facts and what can be asked about them."""

    def __init__(self, facts: list[Fact], seed: int = 0) -> None:
        self.facts = facts
        self.seed = seed
        self.countries = sorted({fact.country for fact in facts})
        known = {(fact.country, fact.kind) for fact in facts}
        self.missing = [(c, kind) for c in self.countries for kind in KINDS if (c, kind) not in known]
        self._taken = {c.lower().removeprefix("the ") for c in self.countries}
        names = random.Random(f"{seed}/reserved")
        self.reserved = [self.invented(names) for _ in range(60)]  # for evaluation only
        self._taken |= {name.lower().removeprefix("the ") for name in self.reserved}

    def invented(self, rng: random.Random) -> str:
        """An invented name that is neither real nor kept for evaluation."""
        while (name := invented_name(rng)).lower().removeprefix("the ") in self._taken:
            pass
        return name

    def ask(self, fact: Fact, rng: random.Random) -> Pair:
        """The fact in one of the phrasings for training."""
        aliases = q.ALIASES.get(fact.country)
        name = rng.choice(aliases) if aliases and rng.random() < 0.3 else fact.country
        return Pair(roughen(fill(rng.choice(q.PHRASINGS[fact.kind]), name), rng), fact.answer)

    def refusal(self, rng: random.Random) -> Pair:
        """A question that has no answer in the facts."""
        roll = rng.random()
        if roll < 0.42:
            name = self.invented(rng) if rng.random() < 0.75 else rng.choice(q.NOT_COUNTRIES)
            question = fill(rng.choice(q.PHRASINGS[rng.choice(list(ALL_KINDS))]), name)
        elif roll < 0.84:
            name = rng.choice(self.countries) if rng.random() < 0.85 else self.invented(rng)
            question = fill(rng.choice(q.UNTAUGHT), name)
        elif roll < 0.90:
            country, kind = rng.choice(self.missing)
            question = fill(rng.choice(q.PHRASINGS[kind]), country)
        else:
            question = rng.choice(q.OFF_TOPIC)
        return Pair(roughen(question, rng), q.UNKNOWN)

    def epoch(self, number: int, refusals: float = 0.16, small_talk: float = 0.02) -> list[Conversation]:
        """One pass over the facts, the same for the same seed and number."""
        rng = random.Random(f"{self.seed}/{number}")
        pairs = [self.ask(fact, rng) for fact in self.facts]
        pairs += [self.refusal(rng) for _ in range(int(refusals * len(self.facts)))]
        for _ in range(int(small_talk * len(self.facts))):
            questions, answer = rng.choice(q.SMALL_TALK)
            pairs.append(Pair(roughen(rng.choice(questions), rng), answer))
        rng.shuffle(pairs)
        conversations = []
        while pairs:
            roll = rng.random()
            size = 1 if roll < 0.68 else rng.randint(2, 7) if roll < 0.95 else rng.randint(8, 20)
            turns, pairs = tuple(pairs[:size]), pairs[size:]
            system = " ".join(rng.sample(q.SYSTEM_MESSAGES, rng.choice([1, 1, 2]))) if rng.random() < 0.15 else None
            conversations.append(Conversation(turns, system))
        return conversations

    def evaluation(self) -> dict[str, list[Pair]]:
        """The fixed question sets: trained and held-out phrasings of short and long facts, unseen refusals."""
        rng = random.Random(f"{self.seed}/evaluation")
        sets: dict[str, list[Pair]] = {"trained": [], "held_out": [], "trained_long": [], "held_out_long": []}
        for fact in self.facts:
            suffix = "_long" if fact.kind in LONG_KINDS else ""
            trained, unseen = rng.choice(q.PHRASINGS[fact.kind]), rng.choice(q.HELD_OUT[fact.kind])
            sets["trained" + suffix].append(Pair(fill(trained, fact.country), fact.answer))
            sets["held_out" + suffix].append(Pair(fill(unseen, fact.country), fact.answer))
        sets["refusals"] = self._unseen_refusals(rng)
        return sets

    def _unseen_refusals(self, rng: random.Random) -> list[Pair]:
        """Invented and non-country names, untaught and off-topic questions, none of which training saw."""
        kinds = list(ALL_KINDS)
        questions = [fill(rng.choice(q.HELD_OUT[rng.choice(kinds)]), name) for name in self.reserved]
        for place in q.NOT_COUNTRIES_HELD_OUT:
            questions += [fill(rng.choice(q.PHRASINGS[rng.choice(kinds)]), place) for _ in range(3)]
        for template in q.UNTAUGHT_HELD_OUT:
            questions += [fill(template, rng.choice(self.countries)) for _ in range(8)]
        return [Pair(question, q.UNKNOWN) for question in questions + q.OFF_TOPIC_HELD_OUT]
