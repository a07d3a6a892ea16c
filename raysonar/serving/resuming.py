"""Streams that outlive the driver they come from."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ray.exceptions import RayError, RayTaskError
from ray.serve.exceptions import BackPressureError, RayServeException, RequestCancelledError

from raysonar.driver.request import Progress
from raysonar.serving.generation import Batch, Deltas, Generation
from raysonar.serving.problems import Problem, ProblemError

RESENDS = 6
"""How often a request is sent again, at the most."""
_FIRST_PAUSE_S = 0.25
"""Before it is sent again; twice as long each time. Serve takes some seconds to replace a driver that is not well."""

Value = TypeVar("Value")
Open = Callable[[Generation], Any]
"""Sends a generation to a driver; returns its batches, which `cancel` stops."""
logger = logging.getLogger("ray.serve")


@dataclass
class _Told:
    """What one prompt's stream has told."""

    prompt: list[int]
    tokens: list[list[int]]
    finished: set[int] = field(default_factory=set)

    @property
    def progress(self) -> Progress:
        return Progress(tuple(map(tuple, self.tokens)), frozenset(self.finished))


class _Record:
    """What has come of a generation."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._told: dict[int, _Told] = {}

    def take(self, deltas: Deltas) -> None:
        """Remember deltas that are passed on."""
        for place, delta in deltas:
            if delta.prompt_token_ids is not None:
                answers = self._generation.params.n
                self._told[place] = _Told(delta.prompt_token_ids, [[] for _ in range(answers)])
            told = self._told[place]
            told.tokens[delta.index] += delta.token_ids
            if delta.finish_reason is not None:
                told.finished.add(delta.index)

    def rest(self, attempt: int) -> Generation:
        """What is still to come. Its id is its own: the driver may be alive, and only out of reach."""
        generation = self._generation
        return replace(
            generation,
            request_id=f"{generation.request_id}-again{attempt}",
            prompts=[
                self._told[place].prompt if place in self._told else prompt
                for place, prompt in enumerate(generation.prompts)
            ],
            progress={place: told.progress for place, told in self._told.items()},
        )


async def resumed(open_stream: Open, generation: Generation, start_timeout_s: float) -> AsyncGenerator[Deltas]:
    """The deltas of a generation, in batches. When its driver is lost, another one goes on behind the last of them.

    A driver must take it within `start_timeout_s`, each time. Raises ProblemError for what a driver refuses, and what
    the last attempt raises. Closing it stops the generation.
    """
    record, wanted = _Record(generation), generation
    for attempt in range(1, RESENDS + 2):
        batches = open_stream(wanted)
        try:
            async with aclosing(_deltas(batches, start_timeout_s)) as news:
                async for deltas in news:
                    record.take(deltas)
                    yield deltas
            return
        except Exception as error:
            if attempt > RESENDS or not _is_lost(error):
                raise
            logger.warning("Request %s has lost its driver and is sent again: %s", generation.request_id, _line(error))
        finally:
            with suppress(Exception):  # of a driver that is gone
                batches.cancel()
        await _pause(attempt)
        wanted = record.rest(attempt)
        if len(wanted.finished) == len(wanted.prompts):
            return


async def asked(ask: Callable[[], Awaitable[Value]]) -> Value:
    """What a driver answers; another one is asked when it is lost. Raises what the last attempt raises."""
    attempt = 1
    while True:
        try:
            return await ask()
        except Exception as error:
            if attempt > RESENDS or not _is_lost(error):
                raise
        await _pause(attempt)
        attempt += 1


async def _pause(attempt: int) -> None:
    await asyncio.sleep(_FIRST_PAUSE_S * 2 ** (attempt - 1))


async def _deltas(batches: AsyncIterator[Batch], start_timeout_s: float) -> AsyncGenerator[Deltas]:
    """But for the empty batch that says that the request has arrived."""
    async with asyncio.timeout(start_timeout_s):
        batch: Batch | None = await anext(batches)
    while batch is not None:
        if isinstance(batch, Problem):
            raise ProblemError(batch)
        if batch:
            yield batch
        batch = await anext(batches, None)


def _is_lost(error: Exception) -> bool:
    """Whether the driver is gone, or its engine has failed; another one may do better."""
    if isinstance(error, ProblemError):
        return error.problem.code == "engine_unavailable"
    refused = isinstance(error, RayTaskError | BackPressureError | RequestCancelledError)
    return isinstance(error, RayError | RayServeException) and not refused


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"
