"""The multi-token-prediction module of DeepSeek V3 and R1."""

import torch

from raysonar.kernels.elementwise import rms_norm
from raysonar.model.batch import Batch
from raysonar.model.cache import KvCache
from raysonar.model.deepseek import DecoderLayer, cache_shape
from raysonar.model.moe import Moe
from raysonar.model.spec import DeepseekSpec
from raysonar.model.transformer import Transformer
from raysonar.model.weights import Weights
from raysonar.moe.executor import Pass


class MtpModule:
    """The multi-token-prediction module (2412.19437, section 2.2): token i+1 and the hidden state of i predict i+2.

    It is split over the ranks as the target is, and shares the target's embedding and head.
    """

    def __init__(self, target: Transformer, spec: DeepseekSpec, weights: Weights) -> None:
        self._spec = spec
        self._target = target
        self._communicators = weights.communicators
        layer = spec.layers
        prefix = f"model.layers.{layer}"
        self._embedding_norm = weights.tensor(f"{prefix}.enorm.weight", spec.hidden)
        self._hidden_norm = weights.tensor(f"{prefix}.hnorm.weight", spec.hidden)
        own = weights.place.share(spec.hidden)
        projection = (f"{prefix}.eh_proj.weight", spec.hidden)
        self._project = weights.linear(projection, in_features=2 * spec.hidden, rows=(own,))
        self._block = DecoderLayer(spec, weights, prefix, layer=layer, moe=spec.moe)
        self._norm = weights.tensor(f"{prefix}.shared_head.norm.weight", spec.hidden)
        self.cache_shapes = [cache_shape(spec)]

    def __call__(self, tokens: torch.Tensor, hidden: torch.Tensor, batch: Batch, cache: KvCache) -> Pass:
        """tokens: int64 [T], each the one after its position's; hidden: [T, hidden], the states of the positions.

        Returns the module's own hidden states before its norm, [T, hidden].
        """
        embedded = rms_norm(self._target.embed(tokens, batch.half), self._embedding_norm, self._spec.eps)
        both = torch.cat((embedded, rms_norm(hidden, self._hidden_norm, self._spec.eps)), -1)
        x = self._communicators[batch.half].gather_over_row(self._project(both), self._spec.hidden, dim=1)
        return (yield from self._block(x, batch, self._target.rotation[batch.positions], cache))

    @property
    def moe(self) -> Moe | None:
        """Its block's experts, if it has any."""
        return self._block.moe

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The module's own final norm."""
        return rms_norm(hidden, self._norm, self._spec.eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The module's hidden states before its norm, [N, hidden] -> fp32 [N, vocab], by the target's head."""
        return self._target.head(self.norm(hidden))
