"""Serve DeepSeek-style mixture-of-experts models on Ray with multi-token-prediction speculation."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raysonar.driver.engine import Engine
    from raysonar.driver.params import SamplingParams
    from raysonar.grammar import Grammar

__all__ = ["Engine", "Grammar", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Import on first use: a part of raysonar that needs no engine loads no torch."""
    if name == "Engine":
        from raysonar.driver.engine import Engine

        return Engine
    if name == "SamplingParams":
        from raysonar.driver.params import SamplingParams

        return SamplingParams
    if name == "Grammar":
        from raysonar.grammar import Grammar

        return Grammar
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
