"""How a stream is put together from several drivers', without Ray."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError, RayTaskError
from ray.serve.exceptions import BackPressureError, RequestCancelledError

from raysonar import SamplingParams
from raysonar.driver.outputs import Delta
from raysonar.driver.request import Progress
from raysonar.serving import resuming
from raysonar.serving.generation import Batch, Generation
from raysonar.serving.problems import Problem, ProblemError, unavailable
from raysonar.serving.resuming import RESENDS, asked, resumed

LOST = ActorUnavailableError("the driver has died", None)
FAILED = unavailable("the engine has failed", "engine_unavailable").problem
FIRST = Delta(0, "ab", [5, 6], prompt_token_ids=[1, 2])
SECOND = Delta(1, "c", [7], finish_reason="stop")
LAST = Delta(0, "d", [8], finish_reason="stop")


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "_FIRST_PAUSE_S", 0.0)


class Drivers:
    """Each attempt gets the next script: batches, and errors that end the stream."""

    def __init__(self, *scripts: list[Batch | Exception]) -> None:
        self._scripts = list(scripts)
        self.asked: list[Generation] = []
        self.cancelled = 0

    def __call__(self, generation: Generation) -> Any:
        self.asked.append(generation)
        return _Stream(self, self._scripts.pop(0))


class _Stream:
    def __init__(self, drivers: Drivers, script: list[Batch | Exception]) -> None:
        self._drivers, self._items = drivers, self._play(script)

    async def _play(self, script: list[Batch | Exception]) -> AsyncGenerator[Batch]:
        for item in script:
            if isinstance(item, Exception):
                raise item
            yield item

    def __aiter__(self) -> "_Stream":
        return self

    async def __anext__(self) -> Batch:
        return await anext(self._items)

    def cancel(self) -> None:
        self._drivers.cancelled += 1


def generation(prompts: int = 1) -> Generation:
    return Generation("r", [f"prompt {place}" for place in range(prompts)], SamplingParams(n=2))


def told(drivers: Drivers, asked: Generation) -> list[tuple[int, Delta]]:
    async def read() -> list[tuple[int, Delta]]:
        return [item async for deltas in resumed(drivers, asked, 10.0) for item in deltas]

    return asyncio.run(asyncio.wait_for(read(), 10.0))


@pytest.mark.parametrize("end", [LOST, FAILED], ids=["lost", "failed"])
def test_another_driver_goes_on_behind_what_was_told(end: Any):
    drivers = Drivers([[], [(0, FIRST)], [(0, SECOND)], end], [[], [(0, LAST)]])
    assert told(drivers, generation()) == [(0, FIRST), (0, SECOND), (0, LAST)]
    first, again = drivers.asked
    assert (first.prompts, first.progress) == (["prompt 0"], {})
    assert again.prompts == [[1, 2]]
    assert again.progress == {0: Progress(((5, 6), (7,)), frozenset({1}))}
    assert again.request_id != first.request_id
    assert drivers.cancelled == 2


def test_prompts_are_sent_again_as_far_as_each_has_come():
    ended = [(2, FIRST), (2, SECOND), (2, LAST)]
    drivers = Drivers([[], [(1, FIRST)], ended, LOST], [LOST], [[], [(1, LAST), (0, FIRST)], LOST], [[]])
    told(drivers, generation(3))
    assert [each.prompts for each in drivers.asked[1:]] == [
        ["prompt 0", [1, 2], [1, 2]],
        ["prompt 0", [1, 2], [1, 2]],
        [[1, 2], [1, 2], [1, 2]],
    ]
    assert drivers.asked[1].finished == {2}
    assert drivers.asked[3].progress[1].tokens == ((5, 6, 8), ())
    assert drivers.asked[3].progress[0].tokens == ((5, 6), ())
    assert len({each.request_id for each in drivers.asked}) == 4


def test_what_is_complete_is_not_sent_again():
    drivers = Drivers([[], [(0, FIRST), (0, SECOND), (0, LAST)], LOST])
    assert len(told(drivers, generation())) == 3


def test_attempts_are_bounded_and_the_last_error_is_told():
    drivers = Drivers(*[[[], LOST]] * RESENDS, [[], ActorUnavailableError("the last one too", None)])
    with pytest.raises(ActorUnavailableError, match="the last one too"):
        told(drivers, generation())
    assert len(drivers.asked) == drivers.cancelled == RESENDS + 1


@pytest.mark.parametrize(
    "error",
    [
        RayTaskError("stream", "a traceback", KeyError("x")),
        BackPressureError(num_queued_requests=1, max_queued_requests=1),
        RequestCancelledError("r"),
        ValueError("x"),
        TimeoutError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_other_errors_end_the_request_at_once(error: Exception):
    drivers = Drivers([[], [(0, FIRST)], error])
    with pytest.raises(type(error)):
        told(drivers, generation())
    assert drivers.cancelled == 1


def test_a_refusal_is_not_sent_again():
    drivers = Drivers([[], Problem(400, "no")])
    with pytest.raises(ProblemError, match="no"):
        told(drivers, generation())


def test_a_driver_that_is_at_its_end_may_say_so_at_once():
    drivers = Drivers([FAILED], [[], [(0, FIRST), (0, LAST), (0, SECOND)]])
    assert told(drivers, generation()) == [(0, FIRST), (0, LAST), (0, SECOND)]


def test_closing_stops_the_driver_that_is_at_it():
    drivers = Drivers([[], [(0, FIRST)], LOST], [[], [(0, SECOND)], [(0, LAST)]])

    async def leave() -> None:
        stream = resumed(drivers, generation(), 10.0)
        await anext(stream)
        await anext(stream)
        await stream.aclose()

    asyncio.run(asyncio.wait_for(leave(), 10.0))
    assert drivers.cancelled == 2


@pytest.mark.parametrize(("lost", "answered"), [(RESENDS, True), (RESENDS + 1, False)])
def test_a_question_is_asked_again_so_many_times(lost: int, answered: bool):
    errors = [LOST] * lost

    async def ask() -> str:
        if errors:
            raise errors.pop()
        return "answer"

    if answered:
        assert asyncio.run(asked(ask)) == "answer"
    else:
        with pytest.raises(ActorUnavailableError):
            asyncio.run(asked(ask))
