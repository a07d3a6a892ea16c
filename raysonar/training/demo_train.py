"""Train the demo models: `python -m raysonar.training.demo_train --out raysonar/demo`.

Made for one CPU thread and a time budget: the learning rate follows the share of the budget that is used, and
a run that is stopped goes on where it was, with the same batches in the same order.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from raysonar.training.demo_conversations import Pair, Source
from raysonar.training.demo_data import load_facts
from raysonar.training.demo_draft import DraftConfig, DraftModel
from raysonar.training.demo_export import export
from raysonar.training.demo_model import DemoConfig, DemoModel
from raysonar.training.demo_probe import probe
from raysonar.training.demo_tokenizer import IGNORED, PAD, encode, token_id, train_tokenizer

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Plan:
    """What a run does; `steps`, if given, replaces the time budget (and is exactly repeatable)."""

    minutes: float = 75.0
    steps: int = 0
    seed: int = 0
    batch_tokens: int = 4096
    rate: float = 3e-3
    warm_up: int = 100
    weight_decay: float = 0.01
    mtp_weight: float = 0.3
    balance_speed: float = 1e-3
    clip: float = 1.0
    save_seconds: float = 120.0
    export_seconds: float = 420.0
    probe_size: int = 60


@dataclass
class Progress:
    """What a resumed run has to know besides weights and optimizer."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    tokens: int = 0
    elapsed: float = 0.0
    best: float = -1.0


def batches(source: Source, tokenizer: Tokenizer, epoch: int, budget: int, longest: int = 512) -> list[Batch]:
    """One epoch: conversations of about equal length together, so that little is padding."""
    rng = random.Random(f"{source.seed}/batches/{epoch}")
    encoded = []
    for conversation in source.epoch(epoch):
        ids, labels = encode(tokenizer, conversation)
        encoded.append((ids[:longest], labels[:longest]))
    encoded.sort(key=lambda sample: len(sample[0]) * rng.uniform(0.9, 1.1))
    groups: list[list[tuple[list[int], list[int]]]] = [[]]
    widest = 0
    for sample in encoded:
        widest = max(widest, len(sample[0]))
        if groups[-1] and widest * (len(groups[-1]) + 1) > budget:
            groups.append([])
            widest = len(sample[0])
        groups[-1].append(sample)
    rng.shuffle(groups)
    pad = token_id(tokenizer, PAD)
    return [pad_group(group, pad) for group in groups if group]


def pad_group(group: list[tuple[list[int], list[int]]], pad: int) -> Batch:
    """Ids and labels of a group, padded on the right."""
    width = max(len(ids) for ids, _ in group)
    ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in group])
    labels = torch.tensor([row + [IGNORED] * (width - len(row)) for _, row in group])
    return ids, labels


def shared_tokenizer(source: Source, vocabulary: int, run_folder: Path) -> Tokenizer:
    """One tokenizer for both models of a run, kept with its state."""
    path = run_folder / "tokenizer.json"
    if path.exists():
        return Tokenizer.from_file(str(path))
    run_folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(source, vocabulary)
    tokenizer.save(str(path))
    return tokenizer


def make_tokenizer(source: Source, vocabulary: int) -> Tokenizer:
    """Trained on the first epochs, which hold every fact in several phrasings."""
    texts: list[str] = []
    for number in range(3):
        for conversation in source.epoch(number):
            texts += [text for turn in conversation.turns for text in (turn.question, turn.answer)]
            texts += [conversation.system] if conversation.system else []
    return train_tokenizer(texts, vocabulary)


def make_optimizer(model: nn.Module, plan: Plan) -> torch.optim.AdamW:
    """AdamW without decay on norms and embeddings."""
    matrices = [p for n, p in model.named_parameters() if p.dim() > 1 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() <= 1 or "embed" in n]
    groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=plan.rate, betas=(0.9, 0.95), fused=True)


class Trainer:
    """One model's run: its state on disk, its log and its exports."""

    def __init__(
        self, model: DemoModel | DraftModel, source: Source, tokenizer: Tokenizer, plan: Plan, run: Path, out: Path
    ) -> None:
        self.model, self.source, self.tokenizer, self.plan = model, source, tokenizer, plan
        self.run, self.out = run, out
        self.optimizer = make_optimizer(model, plan)
        self.progress = Progress()
        self.sets: dict[str, list[Pair]] = source.evaluation()
        run.mkdir(parents=True, exist_ok=True)
        if (run / "state.pt").exists():
            self.resume()

    def resume(self) -> None:
        """Continue from the last saved state."""
        state = torch.load(self.run / "state.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])

    def save(self) -> None:
        """Write the state so that a kill at any time leaves a whole one."""
        partial = self.run / "state.pt.partial"
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": vars(self.progress),
        }
        torch.save(state, partial)
        os.replace(partial, self.run / "state.pt")

    def used(self) -> float:
        """The share of the budget that is used up, 1 at the end."""
        if self.plan.steps:
            return self.progress.step / self.plan.steps
        return self.progress.elapsed / (60 * self.plan.minutes)

    def rate(self) -> float:
        """Linear warm-up, then a cosine down to a hundredth."""
        warm = min(1.0, (self.progress.step + 1) / self.plan.warm_up)
        return self.plan.rate * warm * (0.01 + 0.99 * (1 + math.cos(math.pi * min(1.0, self.used()))) / 2)

    def remaining(self) -> Iterator[Batch]:
        """The batches from where the run is, epoch after epoch."""
        while True:
            longest = self.model.config.max_position_embeddings
            todo = batches(self.source, self.tokenizer, self.progress.epoch, self.plan.batch_tokens, longest)
            while self.progress.batch < len(todo):
                self.progress.batch += 1
                yield todo[self.progress.batch - 1]
            self.progress.epoch, self.progress.batch = self.progress.epoch + 1, 0

    def step(self, batch: Batch) -> dict[str, float]:
        """One update."""
        rate = self.rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        main, mtp = self.model.losses(*batch)
        (main + self.plan.mtp_weight * mtp).backward()  # type: ignore[no-untyped-call]
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.plan.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.balance(self.plan.balance_speed * (1 - min(1.0, self.used())))
        self.progress.step += 1
        self.progress.tokens += batch[0].numel()
        return {"loss": main.item(), "mtp_loss": mtp.item(), "rate": rate, "norm": norm.item()}

    def log(self, **figures: object) -> None:
        """One JSON line on the standard output and in the run's log."""
        line = json.dumps({"seconds": round(self.progress.elapsed), "step": self.progress.step, **figures})
        print(line, flush=True)
        with (self.run / "log.jsonl").open("a") as log:
            log.write(line + "\n")

    def evaluate_and_export(self) -> None:
        """Probe, and export unless an earlier state was better."""
        figures = probe(self.model, self.tokenizer, self.sets, self.plan.probe_size, self.plan.seed)
        score = figures["trained"] + figures["held_out"] + figures["refusals"]
        self.log(epoch=self.progress.epoch, exported=score >= self.progress.best, **figures)
        if score >= self.progress.best:
            self.progress.best = score
            export(self.model, self.tokenizer, self.out)

    def train(self) -> None:
        """Until the budget is used up; the last state is probed and exported like the others."""
        self.model.train()
        saved = exported = last = time.monotonic()
        for batch in self.remaining():
            figures = self.step(batch)
            now = time.monotonic()
            self.progress.elapsed += now - last
            last = now
            if self.progress.step % 50 == 0:
                speed = self.progress.tokens / max(1e-9, self.progress.elapsed)
                self.log(**{k: round(v, 5) for k, v in figures.items()}, tokens_per_second=round(speed))
            done = self.used() >= 1
            if done or now - exported > self.plan.export_seconds:
                self.evaluate_and_export()
                exported = time.monotonic()
            if done or now - saved > self.plan.save_seconds:
                self.save()
                saved = time.monotonic()
            if done:
                return


def run(kind: str, plan: Plan, out: Path, run_folder: Path) -> Trainer:
    """Train one of the two models from its seed (or from its saved state)."""
    torch.manual_seed(plan.seed)
    source = Source(load_facts(), plan.seed)
    model: DemoModel | DraftModel = DemoModel(DemoConfig()) if kind == "target" else DraftModel(DraftConfig())
    tokenizer = shared_tokenizer(source, model.config.vocab_size, run_folder)
    trainer = Trainer(model, source, tokenizer, plan, run_folder / kind, out / kind)
    parameters = sum(p.numel() for p in model.parameters())
    trainer.log(model=kind, parameters=parameters, facts=len(source.facts), minutes=plan.minutes)
    trainer.train()
    return trainer


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("target", "draft"), default="target")
    parser.add_argument("--out", type=Path, default=Path("raysonar/demo"))
    parser.add_argument("--run", type=Path, default=Path("runs/demo"), help="resumable state and log")
    parser.add_argument("--minutes", type=float, default=Plan.minutes)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    run(options.model, Plan(options.minutes, options.steps, options.seed), options.out, options.run)


if __name__ == "__main__":
    main()
