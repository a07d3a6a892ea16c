"""Tiny models and a small set of facts, so that the whole training path runs in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from training.tiny_models import VOCABULARY

from raysonar.training.demo_conversations import Source
from raysonar.training.demo_data import load_facts
from raysonar.training.demo_train import make_tokenizer


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def few() -> Source:
    """The facts of a few countries."""
    return Source([fact for fact in load_facts() if fact.country in ("Chad", "France", "Chile")])


@pytest.fixture(scope="session")
def tokenizer(few: Source) -> Tokenizer:
    return make_tokenizer(few, VOCABULARY)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "exported"
