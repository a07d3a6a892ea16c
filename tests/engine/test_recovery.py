"""Ranks that die, hang or raise are started again in place: streams go on, and texts are as if nothing had been."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
from faults.victims import assert_gone

from raysonar import Engine, SamplingParams
from raysonar.config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    RecoveryConfig,
    SchedulingConfig,
    SpeculationConfig,
)
from raysonar.demo import TARGET
from raysonar.moe.communicator import Communicator
from raysonar.ranks.actor import Meeting, RankActor
from raysonar.ranks.channel import RankInfo
from raysonar.ranks.group import start_group
from raysonar.ranks.rank import Rank

QUESTIONS = ["What is the capital of France?", "Describe the climate of Norway.", "Where is Chad?", "Who are you?"]
STREAMS = 12
TOKENS = 48
pytestmark = pytest.mark.usefixtures("ray_cluster")


@contextmanager
def engine(
    *, tensor: int = 1, data: int = 1, k: int = 1, collective_timeout_s: float = 20.0, actor: Any = RankActor
) -> Iterator[Engine]:
    config = EngineConfig(
        model=TARGET,
        dtype="float32",
        threads=1,
        max_model_len=128,
        cache=CacheConfig(page_size=4, pages=256),
        speculation=SpeculationConfig(tokens=k),
        scheduling=SchedulingConfig(max_running=6),
        parallel=ParallelConfig(
            tensor=tensor, data=data, micro_batching="never", collective_timeout_s=collective_timeout_s
        ),
        recovery=RecoveryConfig(step_timeout_s=60),
    )
    start: dict[str, Any] = {} if tensor * data == 1 else {"start": partial(start_group, actor=actor)}
    with Engine(config, **start) as made:
        yield made


def prompts(made: Engine) -> list[list[int]]:
    chats = [made.tokenizer.render_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
    return [chats[place % len(chats)] for place in range(STREAMS)]


def params() -> list[SamplingParams]:
    """Half of them greedy, half seeded."""
    common: dict[str, Any] = {"max_tokens": TOKENS, "ignore_eos": True}
    return [
        SamplingParams(temperature=0, **common) if place % 2 else SamplingParams(temperature=0.8, seed=place, **common)
        for place in range(STREAMS)
    ]


@cache
def undisturbed() -> list[list[int]]:
    with engine(k=0) as made:
        return [result.token_ids for result in made.generate(prompts(made), params())]


def disturbed(made: Engine, *blows: Callable[[Engine], None]) -> list[list[int]]:
    """What all streams brought, with each blow struck after another third of the tokens."""
    ids: list[list[int]] = [[] for _ in range(STREAMS)]
    left = list(blows)
    for place, delta in made.generate_stream(prompts(made), params()):
        ids[place] += delta.token_ids
        if left and sum(map(len, ids)) > STREAMS * TOKENS // 3 * (1 + len(blows) - len(left)):
            left.pop(0)(made)
    assert not left
    return ids


def strike(rank: int, blow: int) -> Callable[[Engine], None]:
    return lambda made: os.kill(made.info.processes[rank][1], blow)


def assert_all_is_well(made: Engine, recoveries: int) -> None:
    stats = made.stats()
    assert stats.recoveries == recoveries
    assert (stats.running, stats.waiting, stats.pages_free) == (0, 0, stats.pages)
    made.check_health()


@pytest.mark.parametrize(
    ("tensor", "data", "k", "rank", "blow"),
    [
        (1, 2, 1, 1, signal.SIGKILL),
        (2, 1, 0, 0, signal.SIGKILL),
        (1, 2, 0, 0, signal.SIGSTOP),
        (2, 1, 1, 1, signal.SIGSTOP),
    ],
)
def test_streams_go_on_when_a_rank_is_killed_or_hangs(tensor: int, data: int, k: int, rank: int, blow: int) -> None:
    with engine(tensor=tensor, data=data, k=k, collective_timeout_s=3) as made:
        before = {pid for _, pid in made.info.processes}
        assert disturbed(made, strike(rank, blow)) == undisturbed()
        assert_gone(before)
        assert not before & {pid for _, pid in made.info.processes}
        assert_all_is_well(made, 1)


def test_two_failures_in_a_row_and_one_of_a_resting_rank_are_mended() -> None:
    with engine(data=2) as made:
        assert disturbed(made, strike(1, signal.SIGKILL), strike(0, signal.SIGKILL)) == undisturbed()
        strike(1, signal.SIGKILL)(made)
        deadline = time.monotonic() + 60
        while made.stats().recoveries < 3:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert disturbed(made) == undisturbed()
        assert_all_is_well(made, 3)


def dying_at_start(file: Path) -> type[RankActor]:
    """A rank 1 that is killed while it starts, when the file is there; it takes the file along."""

    class Dying(RankActor):
        def start(self, meeting: Meeting) -> RankInfo:
            if self._place.rank == 1 and file.exists():
                file.unlink()
                os.kill(os.getpid(), signal.SIGKILL)
            return super().start(meeting)

    return Dying


def test_a_rank_that_dies_while_it_is_started_again_is_started_once_more(tmp_path: Path) -> None:
    file = tmp_path / "die"

    def blow(made: Engine) -> None:
        file.touch()
        strike(0, signal.SIGKILL)(made)

    with engine(data=2, actor=dying_at_start(file)) as made:
        assert disturbed(made, blow) == undisturbed()
        assert not file.exists()
        assert_all_is_well(made, 1)


def failing_once(file: Path) -> type[RankActor]:
    """A rank 1 that raises in the middle of a layer, once."""

    class Failing(RankActor):
        def communicators(self) -> list[Communicator]:
            made = super().communicators()
            if self._place.rank == 1 and not file.exists():
                calls, exchange = [0], made[0].exchange

                def fail(*transfer: Any) -> Any:
                    calls[0] += 1
                    if calls[0] == 200:
                        file.touch()
                        raise ValueError("injected")
                    return exchange(*transfer)

                made[0].exchange = fail  # type: ignore[method-assign]
            return made

    return Failing


def test_an_error_in_one_ranks_layer_is_mended(tmp_path: Path) -> None:
    with engine(data=2, actor=failing_once(tmp_path / "failed")) as made:
        assert disturbed(made) == undisturbed()
        assert (tmp_path / "failed").exists()
        assert_all_is_well(made, 1)


@pytest.mark.parametrize("k", [0, 1])
def test_an_error_of_a_rank_in_this_process_is_mended_and_frees_its_model(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gc
    import weakref

    steps, verify = [0], Rank.verify
    ranks: list[weakref.ref[Rank]] = []

    def fail(self: Rank, plan: Any) -> Any:
        steps[0] += 1
        if steps[0] in (10, 30):
            ranks.append(weakref.ref(self))
            raise ValueError(f"injected, {steps[0]}")
        return verify(self, plan)

    with engine(k=k) as made:
        monkeypatch.setattr(Rank, "verify", fail)
        assert disturbed(made) == undisturbed()
        assert_all_is_well(made, 2)
        gc.collect()
        assert [rank() for rank in ranks] == [None, None]
