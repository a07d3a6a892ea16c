"""Time of the planner's two calls a step, `schedule` and `commit`, with many running rows.

    python benchmarks/planner.py --rows 256

No model runs: results with random tokens and acceptance stand in for the rank's, so rows grow, take new pages, and
register full ones with the prefix cache, as they do in service.
"""

import argparse
import statistics
import sys
import time

import numpy as np
from measure import emit, table

from raysonar.driver.params import SamplingParams
from raysonar.driver.request import Limits, make_request
from raysonar.driver.scheduler import Scheduler
from raysonar.step import StepPlan, StepResult

VOCAB = 8192
PROMPT = 128


def running_scheduler(rows: int, speculative_tokens: int, steps: int, seed: int) -> Scheduler:
    """A scheduler with this many answers past their prompts, and room for all the steps."""
    length = PROMPT + (steps + 2) * (1 + speculative_tokens) + 1
    pages = rows * -(-length // 16)
    scheduler = Scheduler(
        slots=rows,
        pages=pages + rows,
        page_size=16,
        max_tokens=length,
        token_budget=rows * PROMPT,
        speculative_tokens=speculative_tokens,
    )
    limits = Limits(vocab=VOCAB, max_model_len=length, pages=pages + rows, page_size=16, eos_token_ids=frozenset())
    random = np.random.default_rng(seed)
    for number in range(rows):
        request = make_request(
            request_id=str(number),
            prompt=None,
            prompt_token_ids=random.integers(0, VOCAB, PROMPT).tolist(),
            params=SamplingParams(temperature=0, ignore_eos=True),
            limits=limits,
            sink=lambda _: None,
        )
        scheduler.add(request.answers[0])
    return scheduler


def stand_in(plan: StepPlan, random: np.random.Generator) -> StepResult:
    """A result for the plan: of each row's drafts, a random number accepted."""
    most = int(plan.row_drafts.max(initial=0)) + 1
    accepted = random.integers(0, plan.row_drafts + 1)
    return StepResult(
        number=plan.number,
        count=np.where(plan.row_samples, accepted + 1, 0).astype(np.int32),
        tokens=random.integers(0, VOCAB, (len(plan.row_slot), most), dtype=np.int32),
    )


def measure(rows: int, speculative_tokens: int, steps: int, seed: int = 0) -> dict[str, list[float]]:
    """Milliseconds of each call over the steps."""
    scheduler, random = running_scheduler(rows, speculative_tokens, steps, seed), np.random.default_rng(seed)
    times: dict[str, list[float]] = {"schedule": [], "commit": []}
    for step in range(steps + 1):
        start = time.perf_counter()
        plan = scheduler.schedule()
        planned = time.perf_counter()
        if plan is None or len(plan.row_slot) != rows:
            raise RuntimeError(f"step {step} planned {plan and len(plan.row_slot)} rows, {rows} should run")
        result = stand_in(plan, random)
        received = time.perf_counter()
        scheduler.commit(result)
        if step:  # the first step is the prompts'
            times["schedule"].append(1e3 * (planned - start))
            times["commit"].append(1e3 * (time.perf_counter() - received))
    return times


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Time the planner's calls.")
    parser.add_argument("--rows", type=int, nargs="+", default=[32, 256])
    parser.add_argument("--speculative-tokens", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    rows = []
    for running in options.rows:
        for drafts in options.speculative_tokens:
            times = measure(running, drafts, options.steps)
            row: dict[str, float] = {"rows": running, "k": drafts}
            for call, values in times.items():
                row[f"{call} ms"] = statistics.median(values)
                row[f"{call} p99 ms"] = statistics.quantiles(values, n=100)[98]
            rows.append(row)
            emit(**{name.replace(" ", "_"): value for name, value in row.items()})
    table(rows)


if __name__ == "__main__":
    sys.exit(main())
