"""Batch jobs whose rows are answered by a script, in processes that die on command."""

import json
import multiprocessing
import os
import random
import signal
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from support.memory import anonymous_bytes

from raysonar.batch.job import Job
from raysonar.batch.ledger import Ledger
from raysonar.batch.outcome import Outcome, answered
from raysonar.batch.place import Place
from raysonar.batch.progress import Progress
from raysonar.batch.rows import Asking, Row, Source, request_of

WINDOW = 16
DEADLINE_S = 240.0


class ScriptedReplica:
    """Answers some of the rows it has, in any order; writes each row's place to a log as it does."""

    def __init__(self, *, seed: int, log: Path | None = None, window: int = WINDOW) -> None:
        self._random, self._window = random.Random(seed), window
        self._log = None if log is None else log.open("ab", buffering=0)
        self._held: list[Row] = []
        self.most_held = 0

    async def start(self) -> int:
        return self._window

    async def exchange(self, rows: list[Row]) -> list[Outcome]:
        self._held += rows
        self.most_held = max(self.most_held, len(self._held))
        self._random.shuffle(self._held)
        keep = self._random.randrange(len(self._held))
        finished, self._held = self._held[keep:], self._held[:keep]
        if self._log is not None:
            self._log.write(b"".join(b"%d\n" % row.index for row in finished))
        return [self._answer(row) for row in finished]

    def _answer(self, row: Row) -> Outcome:
        request = request_of(row, Asking(), chat=False)
        return answered(row, request.custom_id, 200, {"choices": [{"text": request.body["prompt"]}]})

    async def close(self) -> None:
        self._held.clear()


@dataclass(frozen=True)
class Death:
    """The process kills itself at the `call`-th call of os.`function`, before it or with a `share` of a write done."""

    function: str
    call: int
    share: float = 0.0


def write_rows(file: Path, count: int) -> None:
    """Rows whose custom_id is `c` and their place."""
    with file.open("w") as lines:
        for index in range(count):
            lines.write(json.dumps({"custom_id": f"c{index}", "prompt": f"prompt {index}"}) + "\n")


def run_job(folder: Path, seed: int, rows_a_part: int, death: Death | None, ordered: bool = True) -> None:
    """The job `in.jsonl` to `out.jsonl`, whose answers are logged in `answered`."""
    if death is not None:
        _arm(death)
    source = Source(Place.of(str(folder / "in.jsonl")), "jsonl")
    fingerprint = {"input": source.fingerprint(), "parameters": {}}
    ledger = Ledger(Place.of(str(folder / "out.jsonl")), fingerprint, rows_a_part=rows_a_part)
    if ledger.complete is None:
        replicas = [ScriptedReplica(seed=seed + number, log=folder / "answered") for number in range(2)]
        with open(os.devnull, "w") as nowhere:
            Job(source, ledger, replicas, Progress(lambda: source.fraction, nowhere), ordered=ordered).run()
    ledger.release()


def _arm(death: Death) -> None:
    real: Callable[..., Any] = getattr(os, death.function)
    calls = 0

    def fatal(*arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < death.call:
            return real(*arguments)
        if death.function == "write":
            descriptor, data = arguments
            real(descriptor, bytes(data)[: int(len(data) * death.share)])
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    setattr(os, death.function, fatal)


def weigh_job(folder: Path, rows_a_part: int, result: Path) -> None:
    """As `run_job`; writes anonymous memory (bytes) at each thousandth outcome, and the most rows held, to `result`."""
    weights: list[int] = []

    class Weighing(ScriptedReplica):
        async def exchange(self, rows: list[Row]) -> list[Outcome]:
            outcomes = await super().exchange(rows)
            if any(outcome.index % 1000 == 0 for outcome in outcomes):
                weights.append(anonymous_bytes())
            return outcomes

    source = Source(Place.of(str(folder / "in.jsonl")), "jsonl")
    ledger = Ledger(Place.of(str(folder / "out.jsonl")), {"input": source.fingerprint()}, rows_a_part=rows_a_part)
    replica = Weighing(seed=0, window=256)
    with open(os.devnull, "w") as nowhere:
        Job(source, ledger, [replica], Progress(lambda: source.fraction, nowhere), ordered=True).run()
    weights.append(anonymous_bytes())
    result.write_text(json.dumps({"weights": weights, "most_held": replica.most_held}))


def in_a_process(function: Callable[..., None], *arguments: Any) -> int:
    """Run it in a process of its own; returns the exit status, minus the signal that killed it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["raysonar.batch.job"])  # what takes the time
    process: BaseProcess = context.Process(target=function, args=arguments, daemon=True)
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode is not None, "the job hangs"
    return process.exitcode
