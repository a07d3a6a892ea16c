"""What HTTP costs: tokens a second through `raysonar serve` against an engine in this process, in turn."""

import argparse
import asyncio
import statistics
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from measure import emit, in_turn, machine, median_ratio, table
from service import serving

from raysonar import Engine
from raysonar.bench.client import Client
from raysonar.bench.offline import run_offline
from raysonar.bench.prompts import Lengths, Sample, random_samples
from raysonar.bench.records import Record
from raysonar.bench.report import Objectives, report
from raysonar.bench.serve import Load, run_load
from raysonar.config import EngineConfig, SchedulingConfig, SpeculationConfig

PARAMETERS = {"temperature": 0.0, "ignore_eos": True}


def through_http(url: str, samples: list[Sample], *, stream: bool) -> list[Record]:
    """All samples asked at once."""

    async def ask() -> list[Record]:
        async with Client(url, chat=False, stream=stream, timeout_s=600, parameters=PARAMETERS) as client:
            load = Load(requests=len(samples), concurrency=len(samples))
            return await run_load(client, iter(samples), load)

    return asyncio.run(ask())


def rate(records: list[Record]) -> float:
    """Tokens a second. Raises RuntimeError when a request failed."""
    figures = report(records, Objectives({}))
    if figures["failed"]:
        raise RuntimeError(f"requests failed: {figures['errors']}")
    return float(figures["tokens_per_s"])


def measure(engine: Engine, url: str, concurrency: int, options: argparse.Namespace) -> dict[str, Any]:
    """Both kinds of answers over the engine, at so many requests at once."""
    words, tokens = Lengths(options.words, options.words), Lengths(options.tokens, options.tokens)
    prompts = random_samples(words, tokens, seed=concurrency)

    def draw() -> list[Sample]:
        return list(islice(prompts, concurrency))

    def alone() -> float:
        samples = draw()
        return rate(run_offline(engine, iter(samples), PARAMETERS, requests=concurrency, warm_up=0, chat=False))

    sides = {
        "engine": alone,
        "streams": lambda: rate(through_http(url, draw(), stream=True)),
        "whole": lambda: rate(through_http(url, draw(), stream=False)),
    }
    in_turn(sides, 1)
    rates = in_turn(sides, options.rounds)
    row: dict[str, Any] = {"concurrency": concurrency, "engine_tokens_per_s": statistics.median(rates["engine"])}
    row |= {f"{side}_over_engine": median_ratio(rates[side], rates["engine"]) for side in ("streams", "whole")}
    emit(**row)
    return row


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path, help="of make_checkpoint.py")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--words", type=int, default=24, help="of a prompt")
    parser.add_argument("--tokens", type=int, default=192, help="of an answer")
    parser.add_argument("--speculative-tokens", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    emit(**{**machine(), **{name: str(value) for name, value in vars(options).items()}})
    most = max(options.concurrency)
    same = {"threads": options.threads, "speculative-tokens": options.speculative_tokens, "max-running": most}
    config = EngineConfig(
        model=options.model,
        threads=options.threads,
        speculation=SpeculationConfig(tokens=options.speculative_tokens),
        scheduling=SchedulingConfig(max_running=most),
    )
    given = [word for name, value in same.items() for word in (f"--{name}", str(value))]
    with Engine(config) as engine, serving(options.model, *given) as url:
        rows = [measure(engine, url, concurrency, options) for concurrency in options.concurrency]
    table(rows)


if __name__ == "__main__":
    main()
