"""From a model folder to modules on a device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from raysonar.errors import ConfigurationError
from raysonar.model.checkpoint import CheckpointReader
from raysonar.model.deepseek import DecoderLayer, load_deepseek
from raysonar.model.folder import ModelFolder
from raysonar.model.llama import load_llama
from raysonar.model.moe import Moe
from raysonar.model.mtp import MtpModule
from raysonar.model.spec import DeepseekSpec, ModelSpec
from raysonar.model.transformer import Transformer
from raysonar.model.weights import Weights
from raysonar.moe.communicator import Communicator, communicators_of_one_rank


@dataclass(frozen=True)
class LoadedModel:
    """A target and, where asked for, its MTP module."""

    target: Transformer
    mtp: MtpModule | None

    @property
    def moe_layers(self) -> list[Moe]:
        """Every layer with experts, the draft's last."""
        found = [layer.moe for layer in self.target.layers if isinstance(layer, DecoderLayer)]
        if self.mtp is not None:
            found.append(self.mtp.moe)
        return [moe for moe in found if moe is not None]

    @property
    def cache_shapes(self) -> list[tuple[int, int]]:
        """(kv_heads, width) of every layer's cache entry, the draft's last."""
        return self.target.cache_shapes + (self.mtp.cache_shapes if self.mtp else [])


def load_model(
    folder: ModelFolder,
    *,
    dtype: torch.dtype,
    device: torch.device,
    communicators: Sequence[Communicator] | None = None,
    mtp: bool = False,
    max_positions: int | None = None,
    redundant_experts: int | None = None,
    progress: bool = False,
) -> LoadedModel:
    """Read a model's weights, shard by shard; of what is split over the ranks, this rank's part.

    communicators: the rank's, one for each half of a step; None for a rank alone. redundant_experts: a layer's expert
    slots beyond one an expert, when experts can move between ranks; None when they cannot.
    max_positions: the positions to prepare rotary embeddings for; None takes the model's own. Raises ConfigurationError
    when `mtp` is asked of a model that has no MTP module, ModelFolderError when the weights do not fit the config.
    """
    check_mtp(folder, mtp)
    positions = max_positions or folder.spec.max_positions
    with torch.inference_mode(), CheckpointReader(folder, dtype=dtype, progress=progress) as reader:
        weights = Weights(
            reader,
            dtype=dtype,
            device=device,
            communicators=communicators or communicators_of_one_rank(),
            redundant_experts=redundant_experts,
        )
        model = build_model(folder.spec, weights, mtp=mtp, max_positions=positions)
        reader.finish()
    return model


def check_mtp(folder: ModelFolder, wanted: bool) -> None:
    """Raises ConfigurationError when an MTP module is wanted of a model that has none."""
    if wanted and not folder.has_mtp:
        raise ConfigurationError(
            f"speculation.tokens: {folder.path} has no MTP module (num_nextn_predict_layers); "
            "use 0 speculative tokens, a draft model (speculation.draft), or a model that has one (DeepSeek V3, R1)"
        )


def build_model(spec: ModelSpec, weights: Weights, *, mtp: bool, max_positions: int) -> LoadedModel:
    """The modules, wherever the weights come from."""
    if isinstance(spec, DeepseekSpec):
        target = load_deepseek(spec, weights, max_positions=max_positions)
        return LoadedModel(target, MtpModule(target, spec, weights) if mtp else None)
    return LoadedModel(load_llama(spec, weights, max_positions=max_positions), None)
