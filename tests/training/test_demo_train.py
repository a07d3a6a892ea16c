"""The trainer learns, stops, goes on exactly, and exports something usable."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from training.tiny_models import TINY, TINY_DRAFT

from raysonar.training.demo_conversations import Conversation, Source
from raysonar.training.demo_draft import DraftModel
from raysonar.training.demo_export import load
from raysonar.training.demo_model import DemoModel
from raysonar.training.demo_probe import exact, greedy, mtp_agreement
from raysonar.training.demo_tokenizer import IGNORED, encode
from raysonar.training.demo_train import Plan, Trainer, batches, pad_group, shared_tokenizer

PLAN = Plan(steps=8, batch_tokens=512, warm_up=2, probe_size=2)


def trainer(
    few: Source, tokenizer: Tokenizer, plan: Plan, tmp: Path, run: str = "run", kind: str = "target"
) -> Trainer:
    torch.manual_seed(0)
    model: DemoModel | DraftModel = DemoModel(TINY) if kind == "target" else DraftModel(TINY_DRAFT)
    return Trainer(model, few, tokenizer, plan, tmp / run, tmp / "out" / run)


def test_batches_hold_everything_once_within_the_budget(few: Source, tokenizer: Tokenizer) -> None:
    made = batches(few, tokenizer, 0, 512)
    widest = max(ids.shape[1] for ids, _ in made)
    assert all(ids.numel() <= max(512, widest) for ids, _ in made)
    assert sum(len(ids) for ids, _ in made) == len(few.epoch(0))
    again = batches(few, tokenizer, 0, 512)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(made, again, strict=True))
    assert all(bool((labels != IGNORED).any(dim=1).all()) for _, labels in made)


def test_a_resumed_run_ends_with_the_same_weights(few: Source, tokenizer: Tokenizer, tmp_path: Path) -> None:
    whole = trainer(few, tokenizer, PLAN, tmp_path, "whole")
    whole.train()
    stopped = trainer(few, tokenizer, PLAN, tmp_path, "stopped")
    for number, batch in enumerate(stopped.remaining(), 1):
        stopped.step(batch)
        if number == 5:
            break
    stopped.save()
    resumed = trainer(few, tokenizer, PLAN, tmp_path, "stopped")
    assert resumed.progress.step == 5
    resumed.train()
    assert resumed.progress.step == whole.progress.step == 8
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], tensor, rtol=0, atol=0)


def test_long_conversations_are_cut_to_the_models_length(few: Source, tokenizer: Tokenizer) -> None:
    made = batches(few, tokenizer, 0, 512, longest=40)
    assert max(ids.shape[1] for ids, _ in made) == 40
    assert len(made) < len(few.epoch(0))


def test_both_models_of_a_run_share_one_tokenizer(few: Source, tmp_path: Path) -> None:
    first = shared_tokenizer(few, 300, tmp_path)
    assert shared_tokenizer(few, 400, tmp_path).to_str() == first.to_str()


@pytest.mark.parametrize("kind", ["target", "draft"])
def test_training_exports_and_logs(kind: str, few: Source, tokenizer: Tokenizer, tmp_path: Path) -> None:
    done = trainer(few, tokenizer, PLAN, tmp_path, kind=kind)
    done.train()
    assert load(done.out).config == done.model.config
    lines = [json.loads(line) for line in (done.run / "log.jsonl").read_text().splitlines()]
    assert lines[-1]["exported"]
    assert {"trained", "held_out", "refusals"} <= set(lines[-1])


def test_a_worse_state_is_not_exported(few: Source, tokenizer: Tokenizer, tmp_path: Path) -> None:
    run = trainer(few, tokenizer, PLAN, tmp_path)
    run.progress.best = 3.0
    run.evaluate_and_export()
    assert not run.out.exists()


def test_the_rate_warms_up_and_decays(few: Source, tokenizer: Tokenizer, tmp_path: Path) -> None:
    run = trainer(few, tokenizer, replace(PLAN, steps=100, warm_up=10), tmp_path)
    rates = []
    for step in range(101):
        run.progress.step = step
        rates.append(run.rate())
    assert max(rates) <= PLAN.rate
    assert rates[0] < rates[8] > rates[50] > rates[100] > 0
    timed = trainer(few, tokenizer, replace(PLAN, steps=0, minutes=1.0), tmp_path)
    timed.progress.elapsed = 30.0
    assert timed.used() == 0.5


def test_a_tiny_model_learns_an_answer_by_heart(few: Source, tokenizer: Tokenizer, tmp_path: Path) -> None:
    run = trainer(few, tokenizer, replace(PLAN, steps=10_000, warm_up=5, rate=1e-2), tmp_path)
    pairs = [pair for pair in few.evaluation()["trained"] if "capital" in pair.question][:2]
    batch = pad_group([encode(tokenizer, Conversation((pair,))) for pair in pairs], 5)
    for _ in range(80):
        figures = run.step(batch)
    run.model.eval()
    assert figures["loss"] < 0.1
    assert exact(run.model, tokenizer, pairs) == 1.0
    assert mtp_agreement(run.model, tokenizer, pairs) > 0.9
    assert len(greedy(run.model, tokenizer, ["hello"], limit=3)) == 1
