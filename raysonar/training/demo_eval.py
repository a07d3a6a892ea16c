"""Measure a demo model with the engine: `python -m raysonar.training.demo_eval`.

Exact answers on trained and held-out phrasings, refusals of unknown things, and how many drafted tokens are
accepted: greedily, at temperature 1, and on text that the model never saw. A model that knows its answers by
heart makes drafting easy, so the last two say more about speculation than the first.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from raysonar.demo import DRAFT, TARGET
from raysonar.training.demo_conversations import Pair, Source
from raysonar.training.demo_data import LONG_KINDS, Fact, country_name, load_facts, read_source, strip_parentheses, tidy
from raysonar.training.demo_tokenizer import encode_prompt

UNSEEN_FIELDS = {"Terrain": "terrain", "Industries": "industries", "Natural hazards": "natural hazards"}


@dataclass
class Count:
    """Drafted and accepted tokens by draft position."""

    drafted: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)

    def add(self, drafted: Sequence[int], accepted: Sequence[int]) -> None:
        """Another result's counts."""
        for ours, theirs in ((self.drafted, drafted), (self.accepted, accepted)):
            ours += [0] * (len(theirs) - len(ours))
            for position, count in enumerate(theirs):
                ours[position] += count

    def rates(self) -> list[float]:
        """Accepted over drafted, position by position."""
        return [round(a / d, 4) for a, d in zip(self.accepted, self.drafted, strict=True) if d]


def sampled(pairs: Sequence[Pair], size: int, seed: int) -> list[Pair]:
    """At most `size` of them, always the same."""
    return list(pairs) if size <= 0 or size >= len(pairs) else random.Random(seed).sample(list(pairs), size)


def unseen_prompts(tokenizer: Tokenizer, size: int, seed: int, given: int = 10) -> list[list[int]]:
    """Beginnings of published texts of kinds that training left out, as answers to be continued."""
    prompts = []
    for record in read_source():
        if topic := UNSEEN_FIELDS.get(record["field"]):
            text = tidy(strip_parentheses(record["text"].encode("ascii", "ignore").decode()))
            tokens = tokenizer.encode(text, add_special_tokens=False).ids
            if len(tokens) > 2 * given:
                question = f"Describe the {topic} of {country_name(record['country'])}."
                prompts.append(encode_prompt(tokenizer, question) + tokens[:given])
    return random.Random(seed).sample(prompts, min(size, len(prompts)))


class Evaluation:
    """One engine and the question sets."""

    def __init__(
        self,
        engine: Any,
        sampling: Callable[..., Any],
        tokenizer: Tokenizer,
        size: int,
        seed: int = 0,
    ) -> None:
        self.engine, self.sampling, self.tokenizer = engine, sampling, tokenizer
        self.size, self.seed = size, seed
        facts = load_facts()
        self.sets = Source(facts, seed).evaluation()
        self.kinds = self._kinds(facts)

    def _kinds(self, facts: list[Fact]) -> dict[tuple[str, str], str]:
        """Which kind a set's question is of: the sets keep the order of the facts."""
        kinds: dict[tuple[str, str], str] = {}
        for suffix, long in (("", False), ("_long", True)):
            ordered = [fact for fact in facts if (fact.kind in LONG_KINDS) == long]
            for name in ("trained" + suffix, "held_out" + suffix):
                for pair, fact in zip(self.sets[name], ordered, strict=True):
                    kinds[name, pair.question] = fact.kind
        return kinds

    def prompts(self, pairs: Sequence[Pair]) -> list[list[int]]:
        """Chat-formatted questions."""
        return [encode_prompt(self.tokenizer, pair.question) for pair in pairs]

    def generate(self, prompts: list[list[int]], temperature: float, count: Count | None, limit: int = 96) -> list[str]:
        """Texts; acceptance goes to `count`."""
        texts = []
        for start in range(0, len(prompts), 64):
            params = self.sampling(temperature=temperature, max_tokens=limit)
            for result in self.engine.generate(prompts[start : start + 64], params):
                texts.append(result.text.strip())
                if count is not None and result.acceptance is not None:
                    count.add(result.acceptance.drafted, result.acceptance.accepted)
        return texts

    def exact(self) -> dict[str, Any]:
        """The share of right answers of every set, by kind too, and greedy acceptance on them."""
        report: dict[str, Any] = {}
        count = Count()
        for name, pairs in self.sets.items():
            chosen = sampled(pairs, self.size, self.seed)
            texts = self.generate(self.prompts(chosen), 0.0, count)
            right = [text == pair.answer for text, pair in zip(texts, chosen, strict=True)]
            report[name] = {"questions": len(chosen), "exact": _mean(right)}
            by_kind: dict[str, list[bool]] = {}
            for hit, pair in zip(right, chosen, strict=True):
                by_kind.setdefault(self.kinds.get((name, pair.question), ""), []).append(hit)
            if len(by_kind) > 1:
                report[name]["kinds"] = {kind: _mean(hits) for kind, hits in sorted(by_kind.items())}
        report["acceptance_greedy"] = {"rates": count.rates(), "drafted": count.drafted}
        return report

    def acceptance(self) -> dict[str, Any]:
        """Acceptance where it is harder: sampled answers, and continuations of unseen text."""
        size = self.size if self.size > 0 else 400
        facts = self.prompts(sampled(self.sets["held_out"] + self.sets["held_out_long"], size, self.seed))
        unseen = unseen_prompts(self.tokenizer, size, self.seed)
        report: dict[str, Any] = {}
        for name, prompts, temperature in (
            ("acceptance_temperature_1", facts, 1.0),
            ("acceptance_unseen_text_greedy", unseen, 0.0),
            ("acceptance_unseen_text_temperature_1", unseen, 1.0),
        ):
            count = Count()
            self.generate(prompts, temperature, count, 48)
            report[name] = {"rates": count.rates(), "drafted": count.drafted}
        return report

    def speed(self, questions: int = 20, rounds: int = 4) -> dict[str, Any]:
        """Tokens per CPU second of the longest answers, one request at a time; the best of some rounds."""
        longest = sorted(self.sets["trained_long"], key=lambda pair: -len(pair.answer))[:questions]
        params = self.sampling(temperature=0.0, max_tokens=96)
        best = 0.0
        for _ in range(rounds):
            began, tokens = time.process_time(), 0
            for prompt in self.prompts(longest):
                tokens += sum(len(result.token_ids) for result in self.engine.generate([prompt], params))
            best = max(best, tokens / max(1e-9, time.process_time() - began))
        return {"tokens_per_cpu_second_batch_1": round(best, 1)}


def _mean(hits: Sequence[bool]) -> float:
    return round(sum(hits) / max(1, len(hits)), 4)


def main() -> None:
    """Command line; the report is JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=TARGET, help=f"exported folder (the draft is {DRAFT.name})")
    parser.add_argument("--sample", type=int, default=0, help="questions a set; 0 takes all")
    parser.add_argument("--draft-model", type=Path, help="drafts in place of the MTP module")
    parser.add_argument("--speculative-tokens", type=int, default=1)
    parser.add_argument("--mtp-hidden", choices=("auto", "pre_norm", "post_norm"), default="auto")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from raysonar import Engine, SamplingParams

    engine = Engine.from_folder(
        options.model,
        dtype="float32",
        draft_model=options.draft_model,
        speculative_tokens=options.speculative_tokens,
        mtp_hidden=options.mtp_hidden,
    )
    tokenizer = Tokenizer.from_file(str(options.model / "tokenizer.json"))
    evaluation = Evaluation(engine, SamplingParams, tokenizer, options.sample, options.seed)
    json.dump({**evaluation.exact(), **evaluation.acceptance(), **evaluation.speed()}, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
