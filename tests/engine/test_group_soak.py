"""What keeps a group of ranks together: the same collectives everywhere, and one fate."""

import random
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import make_deepseek_v3, make_llama

from raysonar import Engine, SamplingParams
from raysonar.config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    RecoveryConfig,
    SchedulingConfig,
    SpeculationConfig,
)
from raysonar.errors import EngineFailedError
from raysonar.moe.communicator import Communicator
from raysonar.ranks.actor import RankActor
from raysonar.ranks.group import start_group

pytestmark = pytest.mark.usefixtures("ray_cluster")
COLLECTIVES = ("sum_over_row", "gather_over_row", "broadcast_over_row", "exchange_counts", "exchange")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_deepseek_v3(tmp_path_factory.mktemp("soak") / "model", mtp=1)


def recording(directory: Path) -> type[RankActor]:
    """A rank that writes down every collective it calls, with the half it calls it for."""

    class Recording(RankActor):
        def communicators(self) -> list[Communicator]:
            file = (directory / f"rank-{self._place.rank}").open("w", buffering=1)

            def recorded(half: int, name: str, call: Any) -> Any:
                def run(*args: Any, **options: Any) -> Any:
                    file.write(f"{half} {name}\n")
                    return call(*args, **options)

                return run

            made = super().communicators()
            for half, communicator in enumerate(made):
                for name in COLLECTIVES:
                    setattr(communicator, name, recorded(half, name, getattr(communicator, name)))
            return made

    return Recording


def failing(rank: int, half: int, call: int) -> type[RankActor]:
    """A rank that raises in the middle of a layer, in one half of a step."""

    class Failing(RankActor):
        def communicators(self) -> list[Communicator]:
            made = super().communicators()
            if self._place.rank == rank:
                left, exchange = [call], made[half].exchange

                def fail(*transfer: Any) -> Any:
                    left[0] -= 1
                    if not left[0]:
                        raise ValueError("injected")
                    return exchange(*transfer)

                made[half].exchange = fail  # type: ignore[method-assign]
            return made

    return Failing


def config(folder: Path, *, tensor: int, data: int, halves: bool, draft: Path | None = None) -> EngineConfig:
    return EngineConfig(
        model=folder,
        dtype="float32",
        threads=1,
        max_model_len=96,
        cache=CacheConfig(page_size=4, pages=24),
        speculation=SpeculationConfig(tokens=2, draft=draft),
        scheduling=SchedulingConfig(max_running=3, token_budget=32, plans_in_flight=2),
        parallel=ParallelConfig(
            tensor=tensor, data=data, micro_batching="always" if halves else "never", collective_timeout_s=20
        ),
    )


@pytest.mark.parametrize(
    ("tensor", "data", "steps", "draft_model"), [(1, 2, 2000, False), (2, 1, 300, False), (2, 2, 300, True)]
)
def test_every_rank_calls_the_same_collectives_whatever_rows_it_holds(
    folder: Path, tmp_path: Path, tensor: int, data: int, steps: int, draft_model: bool
) -> None:
    """Requests come, are cut off, are preempted, and leave rows idle, at random."""
    dice = random.Random(7)
    draft = make_llama(tmp_path / "draft") if draft_model else None
    settings = config(folder, tensor=tensor, data=data, halves=True, draft=draft)
    with Engine(settings, start=partial(start_group, actor=recording(tmp_path))) as engine:
        deadline = time.monotonic() + 240
        while engine.stats().steps < steps:
            assert time.monotonic() < deadline, f"only {engine.stats().steps} steps"
            prompts = [[dice.randrange(300) for _ in range(dice.randint(1, 40))] for _ in range(dice.randint(1, 9))]
            params = [
                SamplingParams(temperature=dice.choice([0, 1]), max_tokens=dice.randint(1, 50), ignore_eos=True)
                for _ in prompts
            ]
            stream = engine.generate_stream(prompts, params)
            for taken, _ in enumerate(stream):
                if dice.random() < 0.004 or taken > 400:
                    stream.close()  # cuts off all that are open
                    break
        stats = engine.stats()
    assert stats.preemptions > 0
    assert stats.aborted > 0
    assert (stats.running, stats.waiting, stats.pages_free) == (0, 0, stats.pages)
    ranks = [(tmp_path / f"rank-{rank}").read_text().splitlines() for rank in range(tensor * data)]
    shortest = min(map(len, ranks))  # the last draft may have been cut off by the end
    assert shortest > steps * 10
    assert all(len(calls) - shortest < 200 for calls in ranks)
    for calls in ranks[1:]:
        assert calls[:shortest] == ranks[0][:shortest]


@pytest.mark.parametrize(("rank", "half"), [(1, 1), (0, 0)])
def test_a_fault_in_one_half_of_a_layer_fails_the_group_with_its_cause(folder: Path, rank: int, half: int) -> None:
    settings = config(folder, tensor=1, data=2, halves=True).model_copy(update={"recovery": RecoveryConfig(restarts=0)})
    with Engine(settings, start=partial(start_group, actor=failing(rank, half, call=41))) as engine:
        began = time.monotonic()
        stream = engine.generate_stream([[5, 6, 7]] * 6, SamplingParams(temperature=0, ignore_eos=True))
        assert next(stream)
        with pytest.raises(EngineFailedError, match=rf"rank {rank}(?s:.)*injected"):
            list(stream)
        assert time.monotonic() - began < 15, "the failure was found by a time-out, not told"
        with pytest.raises(EngineFailedError):
            engine.generate([[5]], SamplingParams(max_tokens=1))
