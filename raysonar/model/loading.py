"""From a model folder to modules on a device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raysonar.errors import ConfigurationError
from raysonar.model.checkpoint import CheckpointReader
from raysonar.model.deepseek import load_deepseek
from raysonar.model.folder import ModelFolder
from raysonar.model.llama import load_llama
from raysonar.model.mtp import MtpModule
from raysonar.model.spec import DeepseekSpec
from raysonar.model.transformer import Transformer
from raysonar.model.weights import Weights
from raysonar.moe.communicator import ALONE, Communicator


@dataclass(frozen=True)
class LoadedModel:
    """A target and, where asked for, its MTP module."""

    target: Transformer
    mtp: MtpModule | None

    @property
    def cache_shapes(self) -> list[tuple[int, int]]:
        """(kv_heads, width) of every layer's cache entry, the draft's last."""
        return self.target.cache_shapes + (self.mtp.cache_shapes if self.mtp else [])


def load_model(
    folder: ModelFolder,
    *,
    dtype: torch.dtype,
    device: torch.device,
    communicators: Sequence[Communicator] = ALONE,
    mtp: bool = False,
    max_positions: int | None = None,
    progress: bool = False,
) -> LoadedModel:
    """Read a model's weights, shard by shard; of what is split over the ranks, this rank's part.

    communicators: the rank's, one for each half of a step.
    max_positions: the positions to prepare rotary embeddings for; None takes the model's own. Raises ConfigurationError
    when `mtp` is asked of a model that has no MTP module, ModelFolderError when the weights do not fit the config.
    """
    spec = folder.spec
    if mtp and not (isinstance(spec, DeepseekSpec) and spec.mtp_modules):
        raise ConfigurationError(
            f"speculation.tokens: {folder.path} has no MTP module (num_nextn_predict_layers); "
            "use 0 speculative tokens, or a model that has one (DeepSeek V3, R1)"
        )
    positions = max_positions or spec.max_positions
    with torch.inference_mode(), CheckpointReader(folder, dtype=dtype, progress=progress) as reader:
        weights = Weights(reader, dtype=dtype, device=device, communicators=communicators)
        if isinstance(spec, DeepseekSpec):
            target = load_deepseek(spec, weights, max_positions=positions)
            module = MtpModule(target, spec, weights) if mtp else None
        else:
            target, module = load_llama(spec, weights, max_positions=positions), None
        reader.finish()
    return LoadedModel(target, module)
