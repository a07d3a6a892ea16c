"""Groups whose tokens travel each way there is: the text of one rank, in fp32 and, where it is sure, in fp8."""

from functools import cache

import pytest

from raysonar import Engine, SamplingParams
from raysonar.config import EngineConfig, ParallelConfig, SchedulingConfig, SpeculationConfig
from raysonar.demo import TARGET

QUESTIONS = ["What is the capital of France?", "Which languages are spoken in Peru?", "Describe the climate of Norway."]
pytestmark = pytest.mark.usefixtures("ray_cluster")


def text(**parallel: object) -> list[list[int]]:
    """Greedy token ids of prompts that are prefilled in chunks while others decode."""
    config = EngineConfig(
        model=TARGET,
        dtype="float32",
        threads=1,
        max_model_len=128,
        speculation=SpeculationConfig(tokens=3),
        scheduling=SchedulingConfig(max_running=3, token_budget=16),
        parallel=ParallelConfig(**parallel),
    )
    with Engine(config) as engine:
        prompts = [engine.tokenizer.render_chat([{"role": "user", "content": each}]) for each in QUESTIONS * 2]
        params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        return [result.token_ids for result in engine.generate(prompts, params)]


@cache
def of_one_rank() -> list[list[int]]:
    return text()


@pytest.mark.parametrize("limit", [0, 2000], ids=["exact", "padded up to some tokens"])
def test_text_does_not_depend_on_the_way_tokens_travel(limit: int) -> None:
    assert text(data=2, micro_batching="always", padded_dispatch_bytes=limit) == of_one_rank()


def test_fp8_tokens_begin_the_answers_as_fp32_ones_do() -> None:
    fp8 = text(data=2, dispatch_dtype="float8")
    assert [ids[:3] for ids in fp8] == [ids[:3] for ids in of_one_rank()]
