"""A dense model as the draft: its cache is right at every position, whatever comes between."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from support.checkpoints import make_deepseek_v3, make_llama

from raysonar import Engine, SamplingParams
from raysonar.demo import DRAFT, TARGET
from raysonar.driver.outputs import Acceptance, GenerationResult
from raysonar.errors import ConfigurationError
from raysonar.training.demo_eval import unseen_prompts

QUESTIONS = [
    "What is the capital of France?",
    "Which languages are spoken in Peru?",
    "What are the agricultural products of Brazil?",
    "Describe the climate of Norway.",
    "What is the highest point of Nepal?",
    "When did India become independent?",
]


@contextmanager
def engine(target: Path = DRAFT, **options: Any) -> Iterator[Engine]:
    """The dense demo model drafting, for itself unless told otherwise, in fp32."""
    settings = {"draft_model": DRAFT, "dtype": "float32", "threads": 1, "max_running": 6, "page_size": 4, **options}
    with Engine.from_folder(target, **settings) as made:
        yield made


@cache
def prompts() -> list[list[int]]:
    with engine() as made:
        return [made.tokenizer.render_chat([{"role": "user", "content": text}]) for text in QUESTIONS]


def params(kind: str) -> list[SamplingParams]:
    """One for each question; answers go on behind their ends, as noise that no draft could know by heart."""
    common: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
    if kind == "greedy":
        return [SamplingParams(temperature=0, **common)] * len(QUESTIONS)
    seeds: list[int | None] = list(range(len(QUESTIONS))) if kind == "seeded" else [None] * len(QUESTIONS)
    return [SamplingParams(temperature=1.0, top_p=0.9, seed=seed, **common) for seed in seeds]


def acceptance(results: Sequence[GenerationResult]) -> Acceptance:
    return sum((result.acceptance for result in results), Acceptance())


@pytest.mark.parametrize("kind", ["greedy", "seeded", "rejection"])
@pytest.mark.parametrize(
    "options",
    [
        {"speculative_tokens": 1},
        {"speculative_tokens": 4},
        {"speculative_tokens": 3, "plans_in_flight": 3},
        {"speculative_tokens": 3, "token_budget": 9},
        {"speculative_tokens": 2, "token_budget": 5, "plans_in_flight": 2},
        {"speculative_tokens": 3, "pages": 40, "plans_in_flight": 2},
        {"speculative_tokens": 3, "prefix_caching": False},
    ],
    ids=str,
)
def test_a_model_that_drafts_for_itself_is_always_accepted(options: dict[str, Any], kind: str) -> None:
    """An entry of the draft's cache that was missing, stale or another text's would give another draft.

    Small budgets cut prompts into chunks and leave rows without drafts between steps with some; few pages preempt.
    """
    with engine(**options) as made:
        first = made.generate(prompts(), params(kind))
        second = made.generate([p + r.token_ids[:21] for p, r in zip(prompts(), first, strict=True)], params(kind))
        stats = made.stats()
    for results in (first, second):
        found = acceptance(results)
        assert found.accepted == found.drafted
        assert found.drafted[0] > 10
    assert ("pages" in options) == (stats.preemptions > 0)
    assert (stats.prefix_hit_tokens > 0) == options.get("prefix_caching", True)
    assert stats.pages_free == stats.pages


@pytest.mark.usefixtures("ray_cluster")
def test_ranks_that_are_told_drafts_and_scores_accept_as_the_first_does() -> None:
    """If they did not, their part of the next step would be of another text, and nothing would be accepted."""
    requests, each = prompts() * 3, [*params("greedy"), *params("seeded"), *params("rejection")]
    with engine(speculative_tokens=3, tensor_parallel=2, max_running=18) as made:
        found = acceptance(made.generate(requests, each))
    assert all(count > 100 for count in found.drafted)
    # the target's sums are of two parts, the draft's are not: some ties within rounding go either way
    assert all(rate > 0.97 for rate in found.rates)


def test_fewer_drafts_than_are_asked_for_come_of_short_budgets() -> None:
    """What the budgets above are for: decode rows without a draft, which the draft's cache must not miss."""
    with engine(speculative_tokens=2, token_budget=5) as made:
        results = made.generate(prompts(), params("greedy"))
        decode_steps = [record for record in made.steps.last() if record.decode_tokens and not record.prefill_tokens]
    assert acceptance(results).drafted[0] > 10
    assert any(record.decode_tokens == record.rows for record in decode_steps)


def test_the_bundled_draft_is_accepted_on_texts_that_neither_model_has_seen() -> None:
    """Its answers are known by heart; these are not."""
    with engine(TARGET, speculative_tokens=3, max_running=16) as made:
        tokenizer = tokenizers.Tokenizer.from_file(str(TARGET / "tokenizer.json"))
        unseen = unseen_prompts(tokenizer, 48, seed=1)
        rates = acceptance(made.generate(unseen, SamplingParams(temperature=0, max_tokens=48))).rates
        known = acceptance(made.generate(prompts(), SamplingParams(temperature=0, max_tokens=60))).rates
    assert all(rate > floor for rate, floor in zip(rates, (0.3, 0.15, 0.05), strict=True))
    assert all(rate > floor for rate, floor in zip(known, (0.95, 0.7, 0.6), strict=True))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target and drafts that do not go with it."""
    root = tmp_path_factory.mktemp("drafts")
    made = {
        "target": make_deepseek_v3(root / "target"),
        "fits": make_llama(root / "fits"),
        "mixture": make_deepseek_v3(root / "mixture"),
        "vocabulary": make_llama(root / "vocabulary", vocab_size=400),
        "short": make_llama(root / "short", max_position_embeddings=100),
        "tokenizer": shutil.copytree(root / "fits", root / "tokenizer"),
    }
    file = made["tokenizer"] / "tokenizer.json"
    values = json.loads(file.read_text())
    vocab = values["model"]["vocab"]
    a, b = sorted(vocab, key=vocab.__getitem__)[-2:]
    vocab[a], vocab[b] = vocab[b], vocab[a]
    file.write_text(json.dumps(values))
    return made


@pytest.mark.parametrize(
    ("draft", "options", "message"),
    [
        ("mixture", {}, r"speculation.draft: .*mixture is a mixture of experts .*LlamaForCausalLM"),
        ("vocabulary", {}, r"speculation.draft: .*vocabulary has a vocabulary of 400 tokens, .*target one of 384"),
        ("short", {}, r"speculation.draft: .*short has 100 positions, fewer than the 512 .* max_model_len to 100"),
        ("short", {"max_model_len": 101}, "fewer than the 101"),
        ("tokenizer", {}, r"speculation.draft: token \d+ is .* in .*tokenizer and .* in .*target"),
        ("fits", {"speculative_tokens": 0}, "draft: a draft model that drafts 0 tokens"),
        ("fits", {"speculative_tokens": 9}, "tokens: Input should be less than or equal to 8"),
        ("fits", {"mtp_hidden": "post_norm"}, "hidden: it is for the MTP module"),
        ("fits", {"mtp_recycled": "pre_norm"}, "recycled: it is for the MTP module"),
        (None, {"speculative_tokens": 5}, "tokens: 5 is for a draft model; an MTP module drafts at most 4"),
        (None, {"speculative_tokens": 2}, r"has no MTP module .* a draft model \(speculation.draft\)"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    folders: dict[str, Path], draft: str | None, options: dict[str, Any], message: str
) -> None:
    chosen = {"draft_model": folders[draft]} if draft else {"draft_model": None}
    with pytest.raises(ConfigurationError, match=message), engine(folders["target"], **chosen, **options):
        pass


def test_a_draft_that_fits_drafts_three_tokens_unless_told_otherwise(folders: dict[str, Path]) -> None:
    with engine(folders["target"], draft_model=folders["fits"]) as made:
        [result] = made.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    with engine(folders["target"], draft_model=None) as made:
        [plain] = made.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert result.token_ids == plain.token_ids
    assert len(result.acceptance.drafted) == 3
    with engine(folders["target"], draft_model=folders["short"], max_model_len=100) as made:
        assert made.info.max_model_len == 100
