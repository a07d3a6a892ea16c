"""One engine after another in the first host, one for each link; started by `overlap.__main__`.

python -m overlap.driver JSON     (the fields of Task; prints a JSON line for each point)
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import ray
from measure import emit, in_turn, median_ratio

from overlap.link import Link, set_link
from overlap.models import layer_bytes
from overlap.sleeping import SleepingActor
from raysonar import Engine, SamplingParams
from raysonar.config import (
    CacheConfig,
    EngineConfig,
    MicroBatching,
    ParallelConfig,
    SchedulingConfig,
    SpeculationConfig,
)
from raysonar.moe.cost_model import PassCost, StepCost
from raysonar.observe.steps import StepRecord
from raysonar.ranks.actor import RankActor
from raysonar.ranks.group import start_group

POLICIES: tuple[MicroBatching, ...] = ("never", "always", "auto")
PROMPT = 4
"""Tokens."""
LENGTH = 1024
"""Tokens of prompt and answer."""
SETTLING = 2
"""Steps that belong to no side: planned before it began, or with the draft of the side before."""
IN_VAIN = 1 << 22
"""`padded_dispatch_bytes`: every step of the benchmark decodes, and no dispatch shall wait for an exchange of sizes."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one cluster of hosts is to measure."""

    address: str
    """Of the Ray cluster."""
    switch: int
    """The file descriptor that sets links."""
    switch_process: int
    model: str
    mode: str
    """"sleep" or "cpu"."""
    ranks: int
    links: list[tuple[float, float]]
    """(delay in ms, rate in Mbit/s)."""
    batches: list[int]
    """Rows in all."""
    rounds: int
    steps: int
    """Of each policy in a round."""


@dataclass(frozen=True)
class Turn:
    """One policy's steps of one round."""

    records: list[StepRecord]
    cpu_seconds: float
    """A step's, of the ranks, the driver and the switch together."""

    @property
    def seconds(self) -> float:
        """The median step."""
        return statistics.median(map(working, self.records))


def working(record: StepRecord) -> float:
    """Seconds of a step without waiting for its plan."""
    return record.verify_seconds + record.draft_seconds


@contextmanager
def engine_of(task: Task) -> Iterator[Engine]:
    """The group, a rank a host."""
    rows = -(-max(task.batches) // task.ranks)
    config = EngineConfig(
        model=Path(task.model),
        dtype="float32",
        device="cpu",
        threads=1,
        max_model_len=LENGTH,
        cache=CacheConfig(prefix_caching=False),
        speculation=SpeculationConfig(tokens=1),
        # the start-up profile goes up to these sizes
        scheduling=SchedulingConfig(max_running=rows, token_budget=3 * rows, plans_in_flight=2),
        parallel=ParallelConfig(
            data=task.ranks, placement="SPREAD", micro_batching="auto", padded_dispatch_bytes=IN_VAIN
        ),
    )
    actor = SleepingActor if task.mode == "sleep" else RankActor
    with Engine(config, start=partial(start_group, actor=actor)) as engine:
        yield engine


def prompts(rows: int) -> list[list[int]]:
    """Token ids, of one length so that all rows go from prompt to answer together."""
    return [[(31 * row + 7 * i) % 250 + 2 for i in range(PROMPT)] for row in range(rows)]


def same_text(engine: Engine, rows: int) -> bool:
    """Whether steps in two halves give the tokens of steps in one."""
    texts = []
    for policy in ("never", "always"):
        engine.micro_batching = policy
        results = engine.generate(prompts(rows), SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))
        texts.append([result.token_ids for result in results])
    return texts[0] == texts[1]


def measure(engine: Engine, rows: int, task: Task) -> dict[str, list[Turn]]:
    """All policies in turn on one running batch, whose every step decodes all rows; one rank has nothing to split."""
    policies = POLICIES if task.ranks > 1 else POLICIES[:1]
    params = SamplingParams(temperature=0, max_tokens=LENGTH - PROMPT, ignore_eos=True)
    stream = engine.generate_stream(prompts(rows), params)
    next(stream)
    try:
        return in_turn({policy: partial(turn, engine, policy, rows, task) for policy in policies}, task.rounds)
    finally:
        stream.close()


def turn(engine: Engine, policy: MicroBatching, rows: int, task: Task) -> Turn:
    """The next steps under a policy."""
    steps = task.steps
    processes = [os.getpid(), task.switch_process, *(process for _, process in engine.info.processes)]
    engine.micro_batching = policy
    while not _all_decode(engine.steps.last(1), rows):
        time.sleep(0.01)
    first = engine.stats().steps_in_flight + engine.steps.last(1)[0].number + SETTLING
    _await_step(engine, first)
    before, start = cpu_seconds(processes), engine.stats().steps
    _await_step(engine, first + steps)
    spent, taken = cpu_seconds(processes) - before, engine.stats().steps - start
    records = [record for record in engine.steps.last(2 * steps + 64) if first <= record.number < first + steps]
    if len(records) != steps or not _all_decode(records, rows):
        raise RuntimeError(f"expected {steps} steps that decode {rows} rows, got {records}")
    return Turn(records, spent / taken)


def _all_decode(records: list[StepRecord], rows: int) -> bool:
    return bool(records) and all(
        (record.rows, record.prefill_tokens, record.decode_tokens) == (rows, 0, 2 * rows) for record in records
    )


def _await_step(engine: Engine, number: int) -> None:
    while engine.steps.last(1)[0].number < number:
        engine.check_health()
        time.sleep(0.01)


def cpu_seconds(processes: Iterable[int]) -> float:
    """Seconds that the threads of these processes have run, ever, all together."""
    threads = [thread for process in processes for thread in Path(f"/proc/{process}/task").glob("*/schedstat")]
    return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9


def figures(turns: dict[str, list[Turn]]) -> dict[str, Any]:
    """What was measured of a point; times in milliseconds, medians."""
    steps = {policy: [record for each in rounds for record in each.records] for policy, rounds in turns.items()}
    typical = {policy: [each.seconds for each in rounds] for policy, rounds in turns.items()}
    records = [record for each in steps.values() for record in each]
    waited = sum(record.wait_seconds for record in records) / sum(record.seconds for record in records)
    shown: dict[str, Any] = {"wait_share": waited}
    for policy, own in steps.items():
        shown[f"{policy}_ms"] = 1e3 * statistics.median(typical[policy])
        shown[f"{policy}_exposed_ms"] = 1e3 * statistics.median(record.exposed_seconds for record in own)
        shown[f"{policy}_cpu_ms"] = 1e3 * statistics.median(each.cpu_seconds for each in turns[policy])
        shown[f"{policy}_split"] = statistics.mean(record.halves == 2 for record in own)
        predicted = [record.predicted_seconds / working(record) for record in own if record.predicted_seconds]
        if predicted:
            shown[f"{policy}_predicted"] = statistics.median(predicted)
    if "auto" in steps:
        best = min(("never", "always"), key=lambda policy: statistics.median(typical[policy]))
        shown["auto_to_best"] = median_ratio(typical["auto"], typical[best])
        shown["auto_reasons"] = sorted({record.reason for record in steps["auto"]})
    return shown


def expected(costs: StepCost, point: dict[str, Any]) -> dict[str, float]:
    """What the layers' profile says of a point, in milliseconds; docs/benchmarks.md has the formulas."""
    tokens, half = (2 * -(-point["D"] // point["ranks"] // halves) for halves in (1, 2))
    passes = [each for each in (costs.verify, costs.draft) if each]
    layers = [layer for each in passes for layer in each.layers.values()]
    left = 1e3 * sum(count * (cost.compute(tokens) - cost.hidden(tokens)) for count, cost in layers)
    gained, pipeline = point["never_ms"] - point["always_ms"], 1e3 * sum(costs.seconds([tokens], [half]))
    ideal = 1e3 * sum(without_overlapping_latencies(each, tokens, half) for each in passes)
    return {
        "compute_ms": 1e3 * sum(count * cost.compute(tokens) for count, cost in layers),
        "communication_ms": 1e3 * sum(count * cost.communication(tokens) for count, cost in layers),
        "transfer_ms": 8e-3 * layer_bytes(tokens, point["ranks"]) / point["rate_mbit"],
        "hidden_share": gained / min(point["never_exposed_ms"], left),
        "ideal_ms": ideal,
        "always_to_ideal": point["always_ms"] / ideal,
        "pipeline_ms": pipeline,
        "always_to_pipeline": point["always_ms"] / pipeline,
    }


def without_overlapping_latencies(cost: PassCost, tokens: int, half: int) -> float:
    """Seconds of a pass in two halves, were each to wait out its latencies before the other sends."""
    layers = cost.layers.values()
    seconds = sum(count * max(2 * layer.compute(half), 2 * layer.communication(half)) for count, layer in layers)
    fill = max(min(layer.compute(half), layer.communication(half)) for _, layer in layers)
    return cost.outside(tokens) + seconds + fill


def lines(costs: StepCost) -> dict[str, float]:
    """w, a, l, c of a layer with experts, in microseconds, the last two a token."""
    _, layer = costs.verify.layers["experts"]
    (w, a), (latency, c) = layer.compute.line(), layer.communication.line()
    return {"w_us": 1e6 * w, "a_us": 1e6 * a, "l_us": 1e6 * latency, "c_us": 1e6 * c}


def main() -> None:
    """Measure every link and batch of the task on the command line."""
    task = Task(**json.loads(sys.argv[1]))
    ray.init(address=task.address, log_to_driver=False)
    with os.fdopen(task.switch, "wb") as switch:
        for number, (delay, rate) in enumerate(task.links):
            set_link(switch, Link(delay_ms=delay, rate_mbit=rate))
            with engine_of(task) as engine:
                if not number and task.ranks > 1:
                    emit(ranks=task.ranks, same_text=same_text(engine, max(task.batches)))
                point = {"mode": task.mode, "ranks": task.ranks, "delay_ms": delay, "rate_mbit": rate}
                if engine.costs:
                    emit(**point, **lines(engine.costs.decode))
                for rows in task.batches:
                    shown = {**point, "D": rows, **figures(measure(engine, rows, task))}
                    emit(**shown, **(expected(engine.costs.decode, shown) if engine.costs else {}))


if __name__ == "__main__":
    main()
