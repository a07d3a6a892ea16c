"""Groups of ranks on Ray: every layout gives the text and the acceptance of one rank, and fails as a whole."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from raysonar import Engine, SamplingParams
from raysonar.demo import DRAFT, TARGET
from raysonar.driver.outputs import Acceptance
from raysonar.errors import ConfigurationError, EngineFailedError

QUESTIONS = [
    "What is the capital of France?",
    "Describe the climate of Norway.",
    "Which languages are spoken in Peru?",
    "What is the highest point of Nepal?",
    "What are the agricultural products of Brazil?",
]
pytestmark = pytest.mark.usefixtures("ray_cluster")


@contextmanager
def engine(**options: Any) -> Iterator[Engine]:
    settings = {"dtype": "float32", "threads": 1, "max_running": 3, "max_model_len": 128, "page_size": 4, **options}
    with Engine.from_folder(TARGET, **settings) as made:
        yield made


def answers(made: Engine) -> tuple[list[list[int]], Acceptance]:
    """Greedy and seeded token ids of more requests than a row has slots; and the acceptance of whole answers.

    (Behind its end, a text is noise, and drafts of noise are accepted by the last bit of a sum.)
    """
    prompts = [made.tokenizer.render_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    common: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True}
    greedy = [SamplingParams(temperature=0, **common)] * len(prompts)
    seeded = [SamplingParams(temperature=0.8, seed=i, **common) for i in range(len(prompts))]
    results = made.generate(prompts * 2, greedy + seeded)
    whole = made.generate(prompts, SamplingParams(temperature=0, max_tokens=80))
    assert made.stats().pages_free == made.stats().pages
    return [result.token_ids for result in results], sum((result.acceptance for result in whole), Acceptance())


@cache
def of_one_rank(k: int, draft: Path | None = None) -> tuple[list[list[int]], Acceptance]:
    with engine(speculative_tokens=k, draft_model=draft) as made:
        return answers(made)


LAYOUTS = [(1, 2), (2, 1), (2, 2), (1, 4)]


@pytest.mark.parametrize(
    ("tensor", "data", "k", "draft"),
    [
        *((tensor, data, k, None) for tensor, data in LAYOUTS for k in (0, 1, 3)),
        *((tensor, data, k, DRAFT) for tensor, data, k in ((1, 2, 3), (2, 1, 1), (2, 2, 3))),
    ],
)
def test_every_layout_split_or_not_gives_the_text_and_the_acceptance_of_one_rank(
    tensor: int, data: int, k: int, draft: Path | None
) -> None:
    """With the prefix cache in every other case. A lone request leaves a half and the other rows' ranks empty."""
    layout = {"tensor_parallel": tensor, "data_parallel": data, "micro_batching": "never"}
    caching = (tensor + data + k) % 2 == 0
    expected, acceptance_of_one = of_one_rank(k, draft)
    assert expected == of_one_rank(0)[0]
    with engine(speculative_tokens=k, draft_model=draft, prefix_caching=caching, **layout) as made:
        assert len({pid for _, pid in made.info.processes} - {os.getpid()}) == tensor * data
        for policy, halves in (("never", 1), ("always", 2)):
            made.micro_batching = policy
            ids, acceptance = answers(made)
            assert ids == expected
            assert acceptance.rates == pytest.approx(acceptance_of_one.rates, abs=0.01)
            assert all(drafted > 10 for drafted in acceptance.drafted)
            assert made.steps.last()[-1].halves == halves
        lone = made.tokenizer.render_chat([{"role": "user", "content": QUESTIONS[0]}])
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        assert made.generate(lone, params)[0].token_ids == expected[0]
        assert (made.stats().prefix_hit_tokens > 0) == caching


@pytest.mark.parametrize(("tensor", "data", "blow"), [(1, 2, signal.SIGKILL), (2, 1, signal.SIGSTOP)])
def test_a_lost_rank_that_is_not_to_be_replaced_ends_every_request_with_its_cause(
    tensor: int, data: int, blow: int
) -> None:
    from raysonar.config import CacheConfig, EngineConfig, ParallelConfig, RecoveryConfig

    config = EngineConfig(
        model=TARGET,
        threads=1,
        cache=CacheConfig(pages=64),
        parallel=ParallelConfig(tensor=tensor, data=data, micro_batching="never", collective_timeout_s=5),
        recovery=RecoveryConfig(restarts=0),
    )
    with Engine(config) as made:
        prompts = [[1, 5, 9]] * 4
        stream = made.generate_stream(prompts, SamplingParams(temperature=0, max_tokens=300, ignore_eos=True))
        next(stream)
        os.kill(made.info.processes[1][1], blow)
        with pytest.raises(EngineFailedError, match="rank"):
            for _ in stream:
                pass
        with pytest.raises(EngineFailedError):
            made.check_health()


def test_a_group_that_has_no_place_says_what_it_needs_and_what_there_is() -> None:
    from raysonar.config import EngineConfig, ParallelConfig

    config = EngineConfig(model=TARGET, threads=3, parallel=ParallelConfig(data=4, start_timeout_s=2))
    with pytest.raises(ConfigurationError, match=r"4 ranks of \{'CPU': 3.0\}.*'CPU': 8.0"):
        Engine(config)


def test_heads_that_cannot_be_shared_are_refused_by_number() -> None:
    with (
        pytest.raises(ConfigurationError, match="4 ranks cannot share the 6 attention heads"),
        engine(tensor_parallel=4),
    ):
        pass
