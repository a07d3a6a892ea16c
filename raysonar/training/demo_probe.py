"""Quick measurements during training, on the training modules themselves (no engine, no cache)."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer

from raysonar.training.demo_conversations import Conversation, Pair
from raysonar.training.demo_draft import DraftModel
from raysonar.training.demo_model import DemoModel
from raysonar.training.demo_tokenizer import END, IGNORED, PAD, encode, encode_prompt, token_id

Model = DemoModel | DraftModel


@torch.no_grad()
def greedy(model: Model, tokenizer: Tokenizer, questions: Sequence[str], limit: int = 24) -> list[str]:
    """Greedy answers; padding on the right is harmless under causal attention."""
    end, pad = token_id(tokenizer, END), token_id(tokenizer, PAD)
    rows = [encode_prompt(tokenizer, question) for question in questions]
    if not rows:
        return []
    starts = [len(row) for row in rows]
    running = list(range(len(rows)))
    for _ in range(limit):
        width = max(len(rows[i]) for i in running)
        ids = torch.tensor([rows[i] + [pad] * (width - len(rows[i])) for i in running])
        last = torch.tensor([len(rows[i]) - 1 for i in running])
        logits = model(ids)[torch.arange(len(running)), last]
        for i, token in zip(running, logits.argmax(-1).tolist(), strict=True):
            rows[i].append(token)
        running = [i for i in running if rows[i][-1] != end]
        if not running:
            break
    return [tokenizer.decode([t for t in row[start:] if t != end]) for row, start in zip(rows, starts, strict=True)]


def exact(model: Model, tokenizer: Tokenizer, pairs: Sequence[Pair], limit: int = 24) -> float:
    """The share of questions whose whole greedy answer is right."""
    answers = greedy(model, tokenizer, [pair.question for pair in pairs], limit)
    return sum(a == pair.answer for a, pair in zip(answers, pairs, strict=True)) / max(1, len(pairs))


@torch.no_grad()
def mtp_agreement(model: Model, tokenizer: Tokenizer, pairs: Sequence[Pair]) -> float:
    """How often the MTP module's choice is the model's own next choice, on reference answers."""
    if not pairs or not isinstance(model, DemoModel) or not model.config.num_nextn_predict_layers:
        return 0.0
    encoded = [encode(tokenizer, Conversation((pair,))) for pair in pairs]
    width = max(len(ids) for ids, _ in encoded)
    pad = token_id(tokenizer, PAD)
    ids = torch.tensor([row + [pad] * (width - len(row)) for row, _ in encoded])
    labels = torch.tensor([row + [IGNORED] * (width - len(row)) for _, row in encoded])
    hidden = model.hidden(ids)
    main = model.lm_head(model.model.norm(hidden)).argmax(-1)[:, 1:-1]
    drafted = model.lm_head(model.mtp_hidden(ids, hidden)).argmax(-1)[:, :-1]
    # Position i drafts token i + 2 once token i + 1, the first that it may be used after, is an answer's.
    kept = (labels[:, 2:] != IGNORED) & (labels[:, 1:-1] != IGNORED)
    return float((main == drafted)[kept].float().mean())


def probe(model: Model, tokenizer: Tokenizer, sets: dict[str, list[Pair]], size: int, seed: int) -> dict[str, float]:
    """A sample of every question set."""
    was_training = model.training
    model.eval()
    rng = random.Random(seed)
    figures = {}
    for name, pairs in sets.items():
        long = name.endswith("_long")
        chosen = rng.sample(pairs, min(size // 3 if long else size, len(pairs)))
        figures[name] = exact(model, tokenizer, chosen, 72 if long else 24)
        if name == "held_out":
            figures["mtp_agreement"] = mtp_agreement(model, tokenizer, chosen)
    model.train(was_training)
    return {name: round(value, 4) for name, value in figures.items()}
