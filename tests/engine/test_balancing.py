"""Experts that move between ranks: the load is evened out, the text stays."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from raysonar import Engine, SamplingParams
from raysonar.config import CacheConfig, EngineConfig, ParallelConfig, SpeculationConfig
from raysonar.demo import TARGET
from raysonar.errors import ConfigurationError
from raysonar.model.balancing import ExpertBalancer, ExpertLoad
from raysonar.ranks.actor import RankActor
from raysonar.ranks.group import start_group

QUESTIONS = ["What is the capital of France?", "Describe the climate of Norway.", "Which languages are spoken in Peru?"]


def config(**parallel: Any) -> EngineConfig:
    return EngineConfig(
        model=TARGET,
        dtype="float32",
        threads=1,
        max_model_len=128,
        cache=CacheConfig(pages=64),
        speculation=SpeculationConfig(tokens=1),
        parallel=ParallelConfig(**parallel),
    )


def answers(engine: Engine) -> list[list[int]]:
    prompts = [engine.tokenizer.render_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    return [result.token_ids for result in engine.generate(prompts, params)]


@cache
def of_one_rank() -> list[list[int]]:
    with Engine(config()) as engine:
        return answers(engine)


def watched(file: Path) -> type[RankActor]:
    """A rank that writes down what its balancer does: per layer, the imbalance before and after, and moves."""

    class Watched(RankActor):
        def start(self, meeting: Any) -> Any:
            inner = ExpertBalancer.rebalance

            def rebalance(balancer: ExpertBalancer) -> ExpertLoad:
                before = [layer.placement for layer in balancer._layers]
                own = [layer.load.tolist() for layer in balancer._layers]
                load = inner(balancer)
                after = [layer.placement for layer in balancer._layers]
                moved = sum(a != b for a, b in zip(before, after, strict=True))
                with (file.parent / f"{file.name}-{self._place.rank}").open("a") as log:
                    log.write(f"{moved} {sum(map(sum, own))} {[p.experts for p in after]}\n")
                return load

            ExpertBalancer.rebalance = rebalance  # type: ignore[method-assign]
            return super().start(meeting)

    return Watched


@contextmanager
def group(file: Path, **parallel: Any) -> Iterator[Engine]:
    with Engine(config(**parallel), start=partial(start_group, actor=watched(file))) as engine:
        yield engine


@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize("layout", [{"data": 2}, {"tensor": 2, "micro_batching": "always"}], ids=str)
@pytest.mark.parametrize("redundant", [0, 6])
def test_text_stays_when_experts_move_and_every_rank_places_them_alike(
    tmp_path: Path, layout: dict[str, Any], redundant: int
) -> None:
    with group(tmp_path / "log", rebalance_steps=7, redundant_experts=redundant, **layout) as engine:
        assert [answers(engine), answers(engine)] == [of_one_rank(), of_one_rank()]
        stats = engine.stats()
    steps = stats.steps
    logs = [(tmp_path / f"log-{rank}").read_text().splitlines() for rank in (0, 1)]
    assert len(logs[0]) == len(logs[1]) == (steps - 1) // 7
    for first, second in zip(*logs, strict=True):
        _, own, placement = first.split(" ", 2)
        assert placement == second.split(" ", 2)[2]
        assert int(own) > 0
    counted = sum(int(line.split()[1]) for log in logs for line in log)
    assert stats.expert_tokens.keys() == {"0", "1"}
    assert abs(sum(stats.expert_tokens.values()) - counted) <= len(logs[0])  # shares of replicas are rounded
    assert 1 <= stats.expert_imbalance <= 2
    assert any(int(line.split()[0]) > 0 for line in logs[0]), "no expert has ever moved"


def test_what_cannot_be_balanced_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="rebalance_steps: there are no experts to move"):
        Engine(config(rebalance_steps=5))
    with pytest.raises(ValueError, match="redundant_experts needs rebalance_steps"):
        ParallelConfig(data=2, redundant_experts=4)
