"""What a batch costs: rows a second through `raysonar batch`'s job against the engine's own generate(), in turn."""

import argparse
import asyncio
import io
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from measure import emit, in_turn, machine, median_ratio, seconds, table

from raysonar import Engine, SamplingParams, demo
from raysonar.batch.job import Job
from raysonar.batch.ledger import Ledger
from raysonar.batch.place import Place
from raysonar.batch.progress import Progress
from raysonar.batch.replicas import EngineReplica
from raysonar.batch.rows import Asking, Source
from raysonar.config import EngineConfig, SchedulingConfig, ServiceConfig


class Kept(EngineReplica):
    """Stays loaded between jobs."""

    @property
    def engine(self) -> Engine:
        """What answers, once it is started."""
        assert self._driver is not None
        return self._driver._engine

    async def close(self) -> None:
        """Only what runs."""
        if self._exchange is not None:
            await self._exchange.close()


def run_job(folder: Path, number: int, replica: Kept) -> None:
    """The whole job, from the file to the file."""
    source = Source(Place.of(str(folder / "in.jsonl")), "jsonl")
    ledger = Ledger(Place.of(str(folder / f"out-{number}.jsonl")), {"input": source.fingerprint()})
    Job(source, ledger, [replica], Progress(lambda: source.fraction, io.StringIO()), ordered=True).run()
    ledger.release()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=demo.TARGET, type=Path)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--max-running", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    scheduling = SchedulingConfig(max_running=options.max_running)
    engine_config = EngineConfig(model=options.model, threads=options.threads, scheduling=scheduling)
    sampling = {"temperature": 0.0, "max_tokens": options.new_tokens, "ignore_eos": True}
    replica = Kept(ServiceConfig(engine=engine_config), Asking(sampling, chat=False))
    asyncio.run(replica.start())
    engine = replica.engine
    draw = np.random.default_rng(0)
    prompts = draw.integers(3, engine.info.vocab, (options.rows, options.prompt_tokens)).tolist()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in.jsonl").write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
        jobs = iter(range(1 + options.rounds))
        params = SamplingParams(**sampling)
        sides = {
            "generate": lambda: seconds(lambda: engine.generate(prompts, params)),
            "batch": lambda: seconds(lambda: run_job(folder, next(jobs), replica)),
        }
        in_turn(sides, 1)
        times = in_turn(sides, options.rounds)
    engine.close()
    ratio = median_ratio(times["generate"], times["batch"])
    tokens = options.rows * options.new_tokens
    rates = {f"{side}_tokens_per_s": tokens / float(np.median(values)) for side, values in times.items()}
    emit(**{**machine(), **{name: str(value) for name, value in vars(options).items()}})
    emit(**rates, batch_over_generate=ratio)
    table([{**rates, "batch / generate": ratio}])


if __name__ == "__main__":
    main()
