"""fp8 tokens are refused where none travel."""

from pathlib import Path

import pytest
from support.checkpoints import make_deepseek_v3, make_llama

from raysonar.config import EngineConfig, ParallelConfig
from raysonar.errors import ConfigurationError
from raysonar.ranks.start import start_ranks


def test_one_rank_has_nobody_to_send_to(tmp_path: Path) -> None:
    config = EngineConfig(model=make_deepseek_v3(tmp_path), parallel=ParallelConfig(dispatch_dtype="float8"))
    with pytest.raises(ConfigurationError, match=r'parallel.dispatch_dtype: "float8".*there is one rank; use "auto"'):
        start_ranks(config)


def test_a_dense_model_has_no_experts_to_send_to(tmp_path: Path) -> None:
    config = EngineConfig(model=make_llama(tmp_path), parallel=ParallelConfig(data=2, dispatch_dtype="float8"))
    with pytest.raises(ConfigurationError, match=r'parallel.dispatch_dtype: "float8".*has no experts; use "auto"'):
        start_ranks(config)
