"""What a rank asks of Ray."""

from raysonar.config import EngineConfig


def rank_resources(config: EngineConfig) -> dict[str, float]:
    """Of one rank whose device is known: its CPU threads (one, unless told otherwise) and, on CUDA, a GPU."""
    need = {"CPU": float(config.threads or 1)}
    if config.device.startswith("cuda"):
        need["GPU"] = 1.0
    return need
