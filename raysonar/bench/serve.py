"""`raysonar bench serve`: load on an endpoint, at a rate or with so many requests at a time."""

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from raysonar.bench.client import Client
from raysonar.bench.prompts import Sample
from raysonar.bench.records import Record


@dataclass(frozen=True, kw_only=True)
class Load:
    """How requests come: at `rate` a second whatever happens to them, or `concurrency` at a time."""

    requests: int
    warm_up: int = 0
    """Requests before, not measured, one after the other."""
    rate: float | None = None
    poisson: bool = True
    """Whether arrivals at a rate are a Poisson process; else evenly spaced."""
    concurrency: int | None = None
    seed: int = 0


def arrivals(load: Load) -> list[float]:
    """When requests are due, in seconds: at `load.rate`, the first at once."""
    assert load.rate is not None
    if load.poisson:
        gaps = np.random.default_rng(load.seed).exponential(1 / load.rate, load.requests - 1)
    else:
        gaps = np.full(load.requests - 1, 1 / load.rate)
    return [0.0, *np.cumsum(gaps).tolist()]


async def run_load(client: Client, samples: Iterator[Sample], load: Load) -> list[Record]:
    """One record a request, in the order in which they were due. Times count from when a request was due, so a client
    that falls behind is seen."""
    for _ in range(load.warm_up):
        await client.ask(next(samples), 0.0, time.perf_counter())
    if load.rate is not None:
        return await _at_a_rate(client, samples, load)
    return await _at_a_time(client, samples, load)


async def _at_a_rate(client: Client, samples: Iterator[Sample], load: Load) -> list[Record]:
    origin = time.perf_counter()
    running = []
    for due in arrivals(load):
        await asyncio.sleep(max(origin + due - time.perf_counter(), 0.0))
        running.append(asyncio.create_task(client.ask(next(samples), due, origin)))
    return list(await asyncio.gather(*running))


async def _at_a_time(client: Client, samples: Iterator[Sample], load: Load) -> list[Record]:
    origin = time.perf_counter()
    left = iter(range(load.requests))
    records: list[Record] = []

    async def worker() -> None:
        for _ in left:
            records.append(await client.ask(next(samples), time.perf_counter() - origin, origin))

    await asyncio.gather(*(worker() for _ in range(load.concurrency or 1)))
    return sorted(records, key=lambda record: record.due)
