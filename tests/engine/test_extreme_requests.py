"""No request that is taken can end the engine, whatever its parameters are: an engine serves others too."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpoints import VOCAB, make_deepseek_v3

from raysonar import Engine, SamplingParams
from raysonar.errors import ConfigurationError, InvalidRequestError

PROMPT = [3, 5, 3, 8]
MAX_MODEL_LEN = 16
PLAIN = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
EXTREMES: dict[str, list[Any]] = {
    "temperature": [0.0, 1e-5, 1.0, 100.0],
    "top_p": [5e-324, 1e-300, 1e-6, 0.5, 1.0],
    "top_k": [0, 1, VOCAB, 2**31 - 1],
    "min_p": [0.0, 5e-324, 1.0],
    "presence_penalty": [-2.0, 0.0, 2.0],
    "frequency_penalty": [-2.0, 0.0, 2.0],
    "repetition_penalty": [0.01, 1.0, 100.0],
    "logit_bias": [{}, dict.fromkeys(range(VOCAB), -100), dict.fromkeys(range(VOCAB), 100), {0: -100, 9: 100}],
    "seed": [None, -(2**63), 2**63 - 1],
    "stop_token_ids": [(), (9, 9), range(VOCAB - 1), range(VOCAB)],
    "min_tokens": [0, 1, 5, 2**31 - 1],
    "max_tokens": [1, 5, None],
    "logprobs": [None, 0, 100],
    "prompt_logprobs": [None, 100],
    "stop": [(), ("a", "a"), ("e", "\ufffd", "\0")],
    "n": [1, 3],
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder: Path = make_deepseek_v3(tmp_path_factory.mktemp("extreme") / "tiny", mtp=1)
    with Engine.from_folder(
        folder, threads=1, speculative_tokens=2, max_model_len=MAX_MODEL_LEN, page_size=4
    ) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine: Engine) -> list[int]:
    return engine.generate(PROMPT, PLAIN)[0].token_ids


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(chosen=st.fixed_dictionaries({name: st.sampled_from(values) for name, values in EXTREMES.items()}))
def test_extremes_are_answered_or_refused_and_the_engine_goes_on(
    engine: Engine, expected: list[int], chosen: dict[str, Any]
) -> None:
    try:
        params = SamplingParams(**chosen)
        [extreme, beside] = engine.generate([PROMPT, PROMPT], [params, PLAIN])
    except InvalidRequestError as refused:
        fault = refused.field
    else:
        fault = None
    if fault is not None:
        assert fault in ("min_tokens", "stop_token_ids")
        return
    assert beside.token_ids == expected
    for completion in extreme.completions:
        tokens = completion.token_ids
        assert params.min_tokens <= len(tokens) <= (params.max_tokens or MAX_MODEL_LEN - len(PROMPT))
        assert not set(tokens[:-1]) & set(params.stop_token_ids)
    assert engine.stats().pages_free == engine.stats().pages


def test_min_tokens_that_no_token_can_reach_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="every token would end the answer") as refused:
        engine.generate(PROMPT, SamplingParams(stop_token_ids=range(VOCAB), min_tokens=1))
    assert refused.value.field == "stop_token_ids"


def test_min_tokens_beyond_the_models_length_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError, match="min_tokens is 13, the answer to this prompt has at most 12 tokens"):
        engine.generate(PROMPT, SamplingParams(min_tokens=13))
    [result] = engine.generate(PROMPT, SamplingParams(min_tokens=12, ignore_eos=True, stop_token_ids=range(VOCAB - 1)))
    assert result.token_ids == [VOCAB - 1] * 12


def test_a_cache_that_memory_does_not_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"need more memory than there is .*lower cache.pages"):
        Engine.from_folder(make_deepseek_v3(tmp_path / "tiny"), threads=1, speculative_tokens=0, pages=10**11)
