"""The bundled demo model with 0 to 4 draft tokens a step: tokens/s, acceptance, and what a simple model predicts.

    python benchmarks/speculation.py --threads 2
    python benchmarks/speculation.py --threads 2 --draft-model raysonar/demo/draft --drafts 0 1 3 5

Prompts are questions in phrasings held out of training whose answers are long; every side answers the same ones, cut
at the same length, in turn. Decode tokens/s is over the tokens after the first of each answer. The model:

    speed-up = (1 + a) / (1 + x),    x = (verify(k) + draft(k) - verify(0)) / step(0)

a: accepted drafts a row and step; verify, draft: mean times of a full decode step, from the engine's step records
(verify has the draft's runs for single tokens in it, draft is its run over the verified batch); step(0): the whole time
of a step without speculation, the driver's share included. Ratios are medians over rounds of the rounds' ratios.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import emit, in_turn, machine, median_ratio, table
from tokenizers import Tokenizer

from raysonar import Engine, SamplingParams
from raysonar.demo import TARGET
from raysonar.observe.steps import StepRecord
from raysonar.training.demo_conversations import Source
from raysonar.training.demo_data import load_facts
from raysonar.training.demo_tokenizer import encode_prompt

Prompts = list[list[int]]


@dataclass(frozen=True)
class Timing:
    """One side in one round."""

    decode_rate: float
    """Tokens/s."""
    verify: float
    """Seconds of a full decode step, the mean."""
    draft: float
    accepted: float
    """Drafts a row and step."""


def long_questions(folder: Path, tokens: int) -> Prompts:
    """Chat prompts of held-out phrasings whose answer has at least this many tokens."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pairs = Source(load_facts(), seed=0).evaluation()["held_out_long"]
    long = [pair for pair in pairs if len(tokenizer.encode(pair.answer, add_special_tokens=False).ids) >= tokens]
    return [encode_prompt(tokenizer, pair.question) for pair in long]


class Side:
    """One engine, asked in batches."""

    def __init__(self, engine: Engine, drafts: int, params: dict[str, Any]) -> None:
        self.engine, self.drafts, self.params = engine, drafts, params

    def answer(self, prompts: Prompts, batch: int, tokens: int) -> tuple[float, list[int]]:
        """Seconds, and the length of each answer; `batch` prompts at a time."""
        params = SamplingParams(max_tokens=tokens, **self.params)
        start, lengths = time.perf_counter(), []
        for first in range(0, len(prompts), batch):
            lengths += [
                len(result.token_ids) for result in self.engine.generate(prompts[first : first + batch], params)
            ]
        return time.perf_counter() - start, lengths

    def measure(self, prompts: Prompts, batch: int, tokens: int) -> Timing:
        """The first tokens alone, then whole answers."""
        prefill, _ = self.answer(prompts, batch, 1)
        before = self.engine.steps.last(1)[0].number
        whole, lengths = self.answer(prompts, batch, tokens)
        full = [record for record in self.engine.steps.last() if record.number > before and self._full(record, batch)]
        return Timing(
            decode_rate=sum(length - 1 for length in lengths) / (whole - prefill),
            verify=statistics.mean(record.verify_seconds for record in full),
            draft=statistics.mean(record.draft_seconds for record in full),
            accepted=sum(record.accepted for record in full) / (batch * len(full)),
        )

    def _full(self, record: StepRecord, batch: int) -> bool:
        tokens = record.prefill_tokens + record.decode_tokens
        return record.rows == batch and tokens == batch * (1 + self.drafts)


def report(batch: int, drafts: int, timings: Sequence[Timing], base: Sequence[Timing]) -> dict[str, Any]:
    """Emits the figures of one number of drafts; returns its row of the table."""
    extra = [(t.verify + t.draft - b.verify) * b.decode_rate / batch for t, b in zip(timings, base, strict=True)]
    predicted = [(1 + t.accepted) / (1 + x) for t, x in zip(timings, extra, strict=True)]
    measured = [t.decode_rate / b.decode_rate for t, b in zip(timings, base, strict=True)]
    row: dict[str, Any] = {
        "batch": batch,
        "k": drafts,
        "tokens/s": statistics.median(t.decode_rate for t in timings),
        "speed-up": statistics.median(measured),
        "tokens a step": 1 + statistics.median(t.accepted for t in timings),
        "verify ms": 1e3 * statistics.median(t.verify for t in timings),
        "draft ms": 1e3 * statistics.median(t.draft for t in timings),
        "extra cost": statistics.median(extra),
        "predicted": statistics.median(predicted),
        "measured/predicted": median_ratio(measured, predicted),
    }
    emit(**{name.replace(" ", "_").replace("-", "_").replace("/", "_per_"): value for name, value in row.items()})
    return row


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure speculation on the demo model.")
    parser.add_argument("--model", type=Path, default=TARGET)
    parser.add_argument("--draft-model", type=Path, help="drafts in place of the MTP module")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="the first is the base")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--new-tokens", type=int, default=40)
    parser.add_argument("--requests", type=int, default=8, help="a round, at least")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    prompts = long_questions(options.model, options.new_tokens)
    params = {"temperature": options.temperature, "ignore_eos": True}
    sides = {
        drafts: Side(
            Engine.from_folder(
                options.model,
                dtype=options.dtype,
                threads=options.threads,
                speculative_tokens=drafts,
                draft_model=options.draft_model if drafts else None,
                max_running=max(options.batches),
                prefix_caching=False,
            ),
            drafts,
            params,
        )
        for drafts in options.drafts
    }
    settings = {name: str(value) for name, value in vars(options).items() if name != "threads"}
    emit(**machine(), **settings, prompts=len(prompts))
    rows = []
    for batch in options.batches:
        size = batch * -(-options.requests // batch)
        chosen = [
            [prompts[(number * size + i) % len(prompts)] for i in range(size)] for number in range(options.rounds)
        ]
        for side in sides.values():
            side.answer(chosen[0][:batch], batch, 8)
        taken = {drafts: iter(chosen) for drafts in sides}

        def turn(drafts: int, batch: int = batch, taken: dict[int, Any] = taken) -> Timing:
            return sides[drafts].measure(next(taken[drafts]), batch, options.new_tokens)

        timings = in_turn({str(drafts): lambda drafts=drafts: turn(drafts) for drafts in sides}, options.rounds)
        base = timings[str(options.drafts[0])]
        rows += [report(batch, drafts, timings[str(drafts)], base) for drafts in options.drafts]
    table(rows)


if __name__ == "__main__":
    sys.exit(main())
