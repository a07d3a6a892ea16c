"""Decode and prefill tokens/s of raysonar's engine and of transformers' generate(), side by side in one run.

    python benchmarks/against_transformers.py runs/random-v3 --dtype bfloat16

Both sides decode greedily the same prompts for the same number of tokens (end of sequence ignored), with the same
threads and dtype. Transformers runs with the fastest of its attention and experts implementations for each batch
size, found first. A round times each side's prefill (one new token) and its whole generation; decode tokens/s is
over the tokens after the first. Figures are medians over rounds, ratios medians of the rounds' ratios. With
--dtype float32 both sides must produce the same tokens, or the script fails.
"""

import argparse
import itertools
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from make_checkpoint import write_checkpoint
from measure import emit, in_turn, machine, median_ratio, seconds, table
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from raysonar import Engine, SamplingParams

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "cpu": time.process_time}


@dataclass(frozen=True)
class Timing:
    """One side's seconds in one round."""

    prefill: float
    whole: float
    tokens: list[list[int]]

    def prefill_rate(self, prompts: Prompts) -> float:
        """Prompt tokens/s."""
        return sum(map(len, prompts)) / self.prefill

    def decode_rate(self) -> float:
        """Tokens/s after each prompt's first."""
        return sum(len(row) - 1 for row in self.tokens) / max(self.whole - self.prefill, 1e-9)


class Transformers:
    """transformers' generate() on one model, with settings that can be changed."""

    def __init__(self, folder: Path, dtype: str) -> None:
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
        self.model.generation_config.eos_token_id = None
        self.model.generation_config.pad_token_id = 0
        self.settings = ("sdpa", "grouped_mm")

    def generate(self, prompts: Prompts, new_tokens: int) -> list[list[int]]:
        """The new tokens."""
        ids = torch.tensor(prompts)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False, use_cache=True
        )
        tokens: list[list[int]] = out[:, ids.shape[1] :].tolist()
        return tokens

    def use(self, attention: str, experts: str) -> None:
        """Switches the implementations."""
        self.model.set_attn_implementation(attention)
        self.model.set_experts_implementation(experts)
        self.settings = (attention, experts)

    def tune(self, prompts: Prompts, new_tokens: int, clock: Clock) -> None:
        """Keeps the settings that generate fastest, each tried twice in turn."""
        experts = ("eager", "grouped_mm", "batched_mm") if len(prompts) == 1 else ("eager", "grouped_mm")
        settings = list(itertools.product(("sdpa", "eager"), experts))

        def attempt(choice: tuple[str, str]) -> float:
            self.use(*choice)
            return seconds(lambda: self.generate(prompts, new_tokens), clock)

        tried = in_turn({str(choice): lambda choice=choice: attempt(choice) for choice in settings}, 2)
        self.use(*min(settings, key=lambda choice: min(tried[str(choice)])))


def engine_side(engine: Engine) -> Generate:
    """The engine as a function of prompts and new tokens."""

    def generate(prompts: Prompts, new_tokens: int) -> list[list[int]]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        return [result.token_ids for result in engine.generate(prompts, params)]

    return generate


def timing(generate: Generate, prompts: Prompts, new_tokens: int, clock: Clock) -> Timing:
    """Prefill alone, then a whole generation."""
    prefill = seconds(lambda: generate(prompts, 1), clock)
    tokens: list[list[int]] = []
    whole = seconds(lambda: tokens.extend(generate(prompts, new_tokens)), clock)
    return Timing(prefill, whole, tokens)


class OtherProcess:
    """Transformers in a process of its own: two OpenMP pools in one process would slow both sides down."""

    def __init__(self, folder: Path, dtype: str, threads: int) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pool = ProcessPoolExecutor(1, spawn, initializer=_load, initargs=(folder, dtype, threads))

    def close(self) -> None:
        """End the process."""
        self._pool.shutdown()

    def tune(self, prompts: Prompts, new_tokens: int, clock: str) -> tuple[str, str]:
        """Keeps the fastest settings, and gives them."""
        return self._pool.submit(_tune, prompts, new_tokens, clock).result()

    def timing(self, prompts: Prompts, new_tokens: int, clock: str) -> Timing:
        """As `timing`, measured there."""
        return self._pool.submit(_timing, prompts, new_tokens, clock).result()


def _load(folder: Path, dtype: str, threads: int) -> None:
    global _theirs
    torch.set_num_threads(threads)
    _theirs = Transformers(folder, dtype)


def _tune(prompts: Prompts, new_tokens: int, clock: str) -> tuple[str, str]:
    _theirs.tune(prompts, new_tokens, CLOCKS[clock])
    return _theirs.settings


def _timing(prompts: Prompts, new_tokens: int, clock: str) -> Timing:
    return timing(_theirs.generate, prompts, new_tokens, CLOCKS[clock])


def agreement(timings: dict[str, list[Timing]]) -> float:
    """The share of prompts for which both sides produced the same tokens."""
    ours, theirs = timings["raysonar"][-1].tokens, timings["transformers"][-1].tokens
    return sum(a == b for a, b in zip(ours, theirs, strict=True)) / len(ours)


def report(batch: int, prompts: Prompts, timings: dict[str, list[Timing]], settings: tuple[str, str]) -> dict[str, Any]:
    """Emits a batch size's figures; returns its row of the table."""
    rates = {
        name: {
            "prefill": [timing.prefill_rate(prompts) for timing in values],
            "decode": [timing.decode_rate() for timing in values],
        }
        for name, values in timings.items()
    }
    row: dict[str, Any] = {"batch": batch}
    for stage in ("prefill", "decode"):
        ours, theirs = rates["raysonar"][stage], rates["transformers"][stage]
        row[f"{stage} ours"], row[f"{stage} theirs"] = statistics.median(ours), statistics.median(theirs)
        row[f"{stage} ratio"] = median_ratio(ours, theirs)
    row["same tokens"] = agreement(timings)
    row["their settings"] = "/".join(settings)
    emit(**{name.replace(" ", "_"): value for name, value in row.items()})
    return row


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure raysonar against transformers' generate().")
    parser.add_argument("folder", type=Path, help="a model; a random one is written there if it does not exist")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: for one thread on a busy machine")
    options = parser.parse_args()
    if not options.folder.exists():
        write_checkpoint(options.folder)
    theirs = OtherProcess(options.folder, options.dtype, options.threads)
    engine = Engine.from_folder(
        options.folder,
        dtype=options.dtype,
        speculative_tokens=0,
        threads=options.threads,
        max_running=max(options.batches),
        prefix_caching=False,
    )
    emit(**machine(), **{name: str(value) for name, value in vars(options).items() if name != "threads"})
    rows = []
    for batch in options.batches:
        generator = torch.Generator().manual_seed(batch)
        prompts = torch.randint(2, 8192, (batch, options.prompt_tokens), generator=generator).tolist()
        settings = theirs.tune(prompts, max(options.new_tokens // 4, 2), options.clock)
        ours, clock = engine_side(engine), CLOCKS[options.clock]
        ours(prompts, 4)
        sides = {
            "raysonar": partial(timing, ours, prompts, options.new_tokens, clock),
            "transformers": partial(theirs.timing, prompts, options.new_tokens, options.clock),
        }
        rows.append(report(batch, prompts, in_turn(sides, options.rounds), settings))
    theirs.close()
    engine.close()
    table(rows)
    return int(options.dtype == "float32" and any(row["same tokens"] < 1 for row in rows))


if __name__ == "__main__":
    sys.exit(main())
