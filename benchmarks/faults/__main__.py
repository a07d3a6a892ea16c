"""Breaks a service in the middle of its requests; see docs/reliability.md, "Measured".

PYTHONPATH=benchmarks python -m faults rank hang driver --runs 5
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any

from measure import emit, machine, table

from faults.load import Load, Outcome
from faults.stage import APPLICATION, Stage
from faults.victims import pids_of

PROMPTS = ("What is the capital of France?", "Describe the climate of Norway.", "Who are you?", "Where is Chad?")
DRIVER = f"ServeReplica:{APPLICATION}:Driver"
INGRESS = f"ServeReplica:{APPLICATION}:Ingress"
RANK = "RankActor"
_GROUP = {"parallel": {"data": 2, "collective_timeout_s": 5, "micro_batching": "never"}}


@dataclass(frozen=True)
class Row:
    """A row of the fault table."""

    what: str
    engine: dict[str, Any]
    blow: Callable[[Stage], None]
    survives: bool = True
    """Whether no request may fail."""


def _strike(name: str, blow: int) -> Callable[[Stage], None]:
    return lambda stage: os.kill(max(pids_of(name)), blow)


ROWS = {
    "rank": Row("kill -9 of one of two ranks", _GROUP, _strike(RANK, signal.SIGKILL)),
    "hang": Row("SIGSTOP of one of two ranks", _GROUP, _strike(RANK, signal.SIGSTOP)),
    "engine": Row(
        "kill -9 of a rank, no restarts left", {**_GROUP, "recovery": {"restarts": 0}}, _strike(RANK, signal.SIGKILL)
    ),
    "driver": Row("kill -9 of the driver replica", {}, _strike(DRIVER, signal.SIGKILL)),
    "stopped-driver": Row("SIGSTOP of the driver replica", {}, _strike(DRIVER, signal.SIGSTOP)),
    "node": Row("a node with the driver dies", {}, lambda stage: stage.kill_node_of(DRIVER)),
    "ranks-node": Row("a node with the ranks dies", _GROUP, lambda stage: stage.kill_node_of(RANK)),
    "ingress": Row("kill -9 of the ingress replica", {}, _strike(INGRESS, signal.SIGKILL), survives=False),
}


def measure(name: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All runs of a row, each with its figures."""
    row, runs = ROWS[name], []
    engine = {"scheduling": {"max_running": 32}, "cache": {"pages": 2048}, "max_model_len": 512, **row.engine}
    with Stage(engine) as stage:
        load = Load(stage.url, stage.model, options.requests, options.tokens, PROMPTS)
        undisturbed = load.run()
        if undisturbed.failures:
            raise RuntimeError(f"an undisturbed run failed: {undisturbed.failures[0]}")
        for run in range(options.runs):
            outcome = load.run(lambda: row.blow(stage), after=options.requests * options.tokens // 8)
            figures = {"row": name, "run": run, **_figures(row, undisturbed, outcome)}
            figures["idle_after_s"] = stage.wait_until_idle()
            emit(**figures)
            for failure in outcome.failures[:2] if row.survives else ():
                print(f"{name}: {failure}", file=sys.stderr)
            runs.append(figures)
            stage.replace_node()
            stage.wait("an ingress", lambda: not load_one(load).failures)
    return runs


def load_one(load: Load) -> Outcome:
    """Whether the service answers."""
    return Load(load.url, load.model, 1, 4, PROMPTS).run()


def _figures(row: Row, undisturbed: Outcome, outcome: Outcome) -> dict[str, Any]:
    compared = outcome.tokens if row.survives else 0
    return {
        "requests": len(outcome.brought),
        "failures": len(outcome.failures),
        "silence_s": outcome.silence_s,
        "tokens_compared": compared,
        "different": outcome.different(undisturbed) if row.survives else 0,
    }


def summary(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of the table."""
    silences = [run["silence_s"] for run in runs]
    totals = {key: sum(run[key] for run in runs) for key in ("requests", "failures", "tokens_compared", "different")}
    return {"row": name, "runs": len(runs), **totals, "silence_s": mean(silences), "longest_s": max(silences)}


def main() -> int:
    """1 when a request failed or brought something else that should not."""
    parser = argparse.ArgumentParser(prog="faults", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; all by default")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32, help="streams, and as many whole answers")
    parser.add_argument("--tokens", type=int, default=160, help="of each answer")
    options = parser.parse_args()
    if unknown := set(options.rows) - ROWS.keys():
        parser.error(f"no such row: {', '.join(sorted(unknown))}")
    emit(**machine())
    names = options.rows or list(ROWS)
    runs = {name: measure(name, options) for name in names}
    table([summary(name, runs[name]) for name in names])
    bad = [run for name in names if ROWS[name].survives for run in runs[name] if run["failures"] or run["different"]]
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
