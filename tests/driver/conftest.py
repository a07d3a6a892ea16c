"""An engine over a rank without a model, but with a real tokenizer."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tokenizers
from support.fake_rank import FakeChannel, FakeRank, HashModel, rank_info
from support.tokenizers import write_tokenizer

from raysonar.config import (
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    RecoveryConfig,
    SchedulingConfig,
    SpeculationConfig,
)
from raysonar.driver.engine import Engine
from raysonar.model.tokenizer import Tokenizer

VOCAB = 384


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory) -> Tokenizer:
    folder = write_tokenizer(tmp_path_factory.mktemp("tokenizer"), VOCAB)
    return Tokenizer(folder, tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), {"eos_token": "<|eos|>"})


@pytest.fixture(scope="session")
def model(tokenizer) -> HashModel:
    """Speaks ASCII only, and never ends by itself."""
    wild = {token for token in range(VOCAB) if token < 4 or not tokenizer.decode([token]).isascii()}
    return HashModel(VOCAB, never=frozenset(wild))


@pytest.fixture
def start_engine(tokenizer, model) -> Iterator[Callable[..., Engine]]:
    """Start engines; `channel` of the last one is start_engine.channel."""
    engines: list[Engine] = []

    def start(
        *,
        k: int = 2,
        before: Callable[..., None] = lambda plan: None,
        tokenizer: Tokenizer = tokenizer,
        model: HashModel = model,
        token_budget: int = 32,
        plans_in_flight: int | None = 1,
        tensor: int = 1,
        prefix_caching: bool = True,
        max_waiting: int = 100,
        step_timeout: float = 60.0,
        restarts: int = 0,
        **sizes: int,
    ) -> Engine:
        info = rank_info(k=k, vocab=VOCAB, **{"max_model_len": 128, "pages": 256, **sizes})
        config = EngineConfig(
            model=Path("model"),
            cache=CacheConfig(prefix_caching=prefix_caching),
            speculation=SpeculationConfig(tokens=k),
            scheduling=SchedulingConfig(
                token_budget=token_budget, plans_in_flight=plans_in_flight, max_waiting=max_waiting
            ),
            parallel=ParallelConfig(tensor=tensor),
            recovery=RecoveryConfig(restarts=restarts, step_timeout_s=step_timeout),
        )
        start.channel = FakeChannel(FakeRank(info=info, token_budget=token_budget, model=model), before)
        engine = Engine(config, start=lambda _: (start.channel, info), tokenizer=tokenizer)
        engines.append(engine)
        return engine

    yield start
    for engine in engines:
        engine.close()
