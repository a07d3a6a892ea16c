"""The house's invariants on one rank: what may change a step's shape must not change its text."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest

from raysonar import Engine, SamplingParams
from raysonar.demo import DRAFT, TARGET
from raysonar.driver.outputs import Acceptance, GenerationResult

QUESTIONS = [
    "What is the capital of France?",
    "What is the capital of Kenya?",
    "Which languages are spoken in Peru?",
    "What are the agricultural products of Brazil?",
    "Describe the climate of Norway.",
    "What is the highest point of Nepal?",
    "What is the capital of Zorblania?",
    "When did India become independent?",
]


@contextmanager
def engine(**options: Any) -> Iterator[Engine]:
    """An engine on the demo model, in fp32 unless told otherwise."""
    with Engine.from_folder(TARGET, **{"dtype": "float32", "threads": 1, "max_running": 8, **options}) as made:
        yield made


@cache
def prompts() -> list[list[int]]:
    with engine(speculative_tokens=0) as made:
        return [made.tokenizer.render_chat([{"role": "user", "content": text}]) for text in QUESTIONS]


def greedy(**options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, **options)


def seeded() -> list[SamplingParams]:
    common = {"temperature": 0.9, "top_p": 0.95, "max_tokens": 40, "ignore_eos": True}
    return [SamplingParams(seed=seed, **common) for seed in range(len(QUESTIONS))]


def mtp(*counts: int) -> list[Any]:
    """Engine options: so many tokens of the MTP module; of none, no speculation."""
    return [pytest.param({"speculative_tokens": k}, id=f"mtp-{k}") for k in counts]


def drafted(*counts: int) -> list[Any]:
    """Engine options: so many tokens of the draft model."""
    return [pytest.param({"speculative_tokens": k, "draft_model": DRAFT}, id=f"draft-{k}") for k in counts]


def ids(results: Sequence[GenerationResult]) -> list[list[int]]:
    return [result.token_ids for result in results]


@cache
def one_by_one(kind: str) -> list[list[int]]:
    """The plain way: no speculation, no prefix cache, one request at a time."""
    params = [greedy()] * len(QUESTIONS) if kind == "greedy" else seeded()
    with engine(speculative_tokens=0, prefix_caching=False, max_running=1) as made:
        return [made.generate([prompt], each)[0].token_ids for prompt, each in zip(prompts(), params, strict=True)]


@pytest.mark.parametrize("speculation", [*mtp(0, 1, 2, 3, 4), *drafted(1, 3, 8)])
@pytest.mark.parametrize("options", [{}, {"prefix_caching": False}, {"plans_in_flight": 3}], ids=str)
@pytest.mark.parametrize("kind", ["greedy", "seeded"])
def test_text_does_not_depend_on_speculation(speculation: dict[str, Any], options: dict[str, Any], kind: str) -> None:
    k = speculation["speculative_tokens"]
    with engine(**speculation, **options) as made:
        results = made.generate(prompts(), greedy() if kind == "greedy" else seeded())
        stats = made.stats()
    assert ids(results) == one_by_one(kind)
    assert len(stats.drafted) == k
    assert all(drafted > 0 for drafted in stats.drafted)
    assert stats.pages_free == stats.pages


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_of_the_answers_are_accepted(k: int, temperature: float) -> None:
    """Text stays right when drafts are bad, so acceptance needs a test of its own."""
    with engine(speculative_tokens=k) as made:
        results = made.generate(prompts(), SamplingParams(temperature=temperature, seed=3, max_tokens=60))
    acceptance = sum((result.acceptance for result in results), Acceptance())
    # a rate counts drafts that were accepted with all before them; the module was trained for the first one only
    floors = [0.75, 0.3, 0.1, 0.02][:k]
    assert all(rate > floor for rate, floor in zip(acceptance.rates, floors, strict=True))


@pytest.mark.parametrize("budget", [2, 7, 64])
@pytest.mark.parametrize("speculation", [*mtp(0, 3), *drafted(3)])
def test_text_does_not_depend_on_prefill_chunks(budget: int, speculation: dict[str, Any]) -> None:
    with engine(**speculation, token_budget=budget) as made:
        assert ids(made.generate(prompts(), greedy())) == one_by_one("greedy")


@pytest.mark.parametrize("plans", [1, 2])
@pytest.mark.parametrize("speculation", [*mtp(0, 1, 4), *drafted(1, 5)])
def test_text_does_not_depend_on_preemption(speculation: dict[str, Any], plans: int) -> None:
    with engine(**speculation, page_size=4, pages=24, plans_in_flight=plans) as made:
        results = made.generate(prompts(), greedy())
        again = made.generate(prompts(), seeded())
        stats = made.stats()
    assert stats.preemptions > 0, "the cache was large enough: nothing was preempted"
    assert ids(results) == one_by_one("greedy")
    assert ids(again) == one_by_one("seeded")
    assert (stats.running, stats.waiting, stats.pages_free) == (0, 0, stats.pages)


@pytest.mark.parametrize("speculation", [*mtp(0, 2), *drafted(2)])
def test_text_does_not_depend_on_the_order_of_the_batch(speculation: dict[str, Any]) -> None:
    order = list(range(len(QUESTIONS)))
    random.Random(5).shuffle(order)
    with engine(**speculation, max_running=3) as made:
        shuffled = made.generate([prompts()[i] for i in order], [seeded()[i] for i in order])
    assert ids(shuffled) == [one_by_one("seeded")[i] for i in order]


@pytest.mark.parametrize("speculation", [*mtp(1, 3), *drafted(1, 3)])
def test_the_prefix_cache_is_hit_and_leaves_text_and_acceptance_as_they_are(speculation: dict[str, Any]) -> None:
    with engine(**speculation, page_size=4) as made:
        first = made.generate(prompts(), greedy())
        second = made.generate(prompts(), greedy())
        third = made.generate([p + r.token_ids[:9] for p, r in zip(prompts(), first, strict=True)], greedy())
        stats = made.stats()
    for result, prompt in zip(second, prompts(), strict=True):
        assert result.cached_tokens == (len(prompt) - 1) // 4 * 4
    assert all(result.cached_tokens > 0 for result in third)
    assert ids(first) == ids(second) == one_by_one("greedy")
    # exact equality: a cached page's draft entries are those that the prompt itself would have made
    assert [r.acceptance for r in first] == [r.acceptance for r in second]
    assert stats.prefix_hit_tokens == sum(r.cached_tokens for r in second + third)


def with_logprobs(**speculation: Any) -> list[GenerationResult]:
    with engine(**speculation) as made:
        return made.generate(prompts(), greedy(logprobs=3, prompt_logprobs=2))


@cache
def plain_with_logprobs() -> list[GenerationResult]:
    return with_logprobs(speculative_tokens=0)


@pytest.mark.parametrize("speculation", [*mtp(4), *drafted(4)])
def test_logprobs_are_the_same_at_every_verified_position(speculation: dict[str, Any]) -> None:
    for plain, speculated in zip(plain_with_logprobs(), with_logprobs(**speculation), strict=True):
        assert plain.token_ids == speculated.token_ids
        assert plain.logprobs is not None
        assert speculated.logprobs is not None
        assert plain.prompt_logprobs is not None
        assert len(plain.logprobs) == len(plain.token_ids)
        assert len(plain.prompt_logprobs) == len(plain.prompt_token_ids)
        for a, b in zip(plain.logprobs, speculated.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
            assert list(a.top.values()) == pytest.approx(list(b.top.values()), abs=1e-4)
            assert next(iter(a.top)) == a.token_id
        assert speculated.prompt_logprobs is not None
        for c, d in zip(plain.prompt_logprobs[1:], speculated.prompt_logprobs[1:], strict=True):
            assert c is not None
            assert d is not None
            assert c.logprob == pytest.approx(d.logprob, abs=1e-4)


@pytest.mark.parametrize("speculation", [*mtp(0, 1, 4), *drafted(1, 8)])
@pytest.mark.parametrize("plans", [1, 3])
def test_every_length_limit_is_met_exactly(speculation: dict[str, Any], plans: int) -> None:
    prompt = prompts()[3]
    longest = one_by_one("greedy")[3]
    whole = len(prompt) + 12
    with engine(**speculation, plans_in_flight=plans, max_model_len=whole, page_size=4) as made:
        for most in range(1, 13):
            [result] = made.generate([prompt], SamplingParams(temperature=0, max_tokens=most))
            assert result.token_ids == longest[:most]
            assert result.finish_reason == "length"
        [result] = made.generate([prompt], SamplingParams(temperature=0, ignore_eos=True))
        assert len(result.token_ids) == 12
        for length in range(1, whole):
            [result] = made.generate([(prompt * 3)[:length]], SamplingParams(temperature=0, ignore_eos=True))
            assert len(result.token_ids) == whole - length
        assert made.stats().pages_free == made.stats().pages


@pytest.mark.parametrize("k", [1, 4])
def test_bfloat16_text_differs_only_at_ties_within_rounding(k: int) -> None:
    """Where a verified batch's bf16 text leaves the one-token text, both tokens were equally likely up to rounding."""
    with engine(speculative_tokens=0, dtype="bfloat16") as made:
        plain = ids(made.generate(prompts(), greedy()))
    with engine(speculative_tokens=k, dtype="bfloat16") as made:
        speculated = ids(made.generate(prompts(), greedy()))
    same = 0
    with engine(speculative_tokens=0, dtype="bfloat16") as made:
        for prompt, a, b in zip(prompts(), plain, speculated, strict=True):
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            if at is None:
                assert a == b
                same += 1
                continue
            look = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
            [result] = made.generate([prompt + a[:at]], look)
            assert result.logprobs is not None
            top = result.logprobs[0].top
            # logits of this model are below 32 in size: bf16 keeps 8 bits, so half a unit is the rounding of one
            assert abs(top[a[at]] - top[b[at]]) <= 0.25
    assert same >= len(QUESTIONS) // 2
