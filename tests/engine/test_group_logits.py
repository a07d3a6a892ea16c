"""Groups of ranks compute the logits of one rank, by the log-probabilities of every prompt and answer token."""

from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import make_deepseek_v2, make_deepseek_v3

from raysonar import Engine, SamplingParams
from raysonar.driver.outputs import TokenLogprob

PROMPTS = [[5, 9, 200, 7, 31, 8, 64, 3], [301, 4, 4, 17], [77] * 13]
MAKERS = {"v2": make_deepseek_v2, "v3": lambda folder: make_deepseek_v3(folder, mtp=1)}


@pytest.fixture(scope="module", params=list(MAKERS))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MAKERS[request.param](tmp_path_factory.mktemp("logits") / request.param)


def logprobs(folder: Path, **layout: Any) -> list[list[TokenLogprob]]:
    """Of each prompt's tokens and of its answer's, with the five likeliest."""
    settings: dict[str, Any] = {"dtype": "float32", "threads": 1, "max_running": 2, "token_budget": 6, "page_size": 4}
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5, prompt_logprobs=5)
    with Engine.from_folder(folder, **settings, **layout) as engine:
        results = engine.generate(PROMPTS, params)
    return [[entry for entry in (*(r.prompt_logprobs or []), *(r.logprobs or [])) if entry] for r in results]


@pytest.fixture(scope="module")
def alone(folder: Path) -> list[list[TokenLogprob]]:
    """Of one rank."""
    return logprobs(folder)


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(("tensor", "data"), [(1, 2), (2, 1), (2, 2), (1, 4)])
def test_logits_of_a_group_are_those_of_one_rank(
    folder: Path, alone: list[list[TokenLogprob]], tensor: int, data: int
) -> None:
    group = logprobs(folder, tensor_parallel=tensor, data_parallel=data, micro_batching="always")
    assert [len(row) for row in alone] == [len(prompt) - 1 + 6 for prompt in PROMPTS]
    for ours, theirs in zip(group, alone, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            assert mine.token_id == other.token_id
            assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert list(mine.top.values()) == pytest.approx(list(other.top.values()), abs=1e-4)
