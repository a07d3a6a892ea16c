"""The multi-token-prediction module of DeepSeek V3 and R1."""

import torch

from raysonar.kernels.elementwise import rms_norm
from raysonar.model.batch import Batch
from raysonar.model.cache import KvCache
from raysonar.model.deepseek import DecoderLayer, cache_shape
from raysonar.model.spec import DeepseekSpec
from raysonar.model.transformer import Transformer
from raysonar.model.weights import Weights


class MtpModule:
    """The multi-token-prediction module (2412.19437, section 2.2): token i+1 and the hidden state of i predict i+2."""

    def __init__(self, target: Transformer, spec: DeepseekSpec, weights: Weights) -> None:
        self._eps = spec.eps
        self._target = target
        self.layer = spec.layers
        prefix = f"model.layers.{self.layer}"
        self._embedding_norm = weights.tensor(f"{prefix}.enorm.weight", spec.hidden)
        self._hidden_norm = weights.tensor(f"{prefix}.hnorm.weight", spec.hidden)
        self._project = weights.linear((f"{prefix}.eh_proj.weight", spec.hidden), in_features=2 * spec.hidden)
        self._block = DecoderLayer(spec, weights, prefix, layer=self.layer, moe=spec.moe)
        self._norm = weights.tensor(f"{prefix}.shared_head.norm.weight", spec.hidden)
        self.cache_shapes = [cache_shape(spec)]

    def __call__(self, tokens: torch.Tensor, hidden: torch.Tensor, batch: Batch, cache: KvCache) -> torch.Tensor:
        """tokens: int64 [T], each the one after its position's; hidden: [T, hidden], the states of the positions.

        Returns the module's own hidden states before its norm, [T, hidden].
        """
        embedded = rms_norm(self._target.embedding[tokens], self._embedding_norm, self._eps)
        x = self._project(torch.cat((embedded, rms_norm(hidden, self._hidden_norm, self._eps)), -1))
        return self._block(x, batch, self._target.rotation[batch.positions], cache)

    def norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The module's own final norm."""
        return rms_norm(hidden, self._norm, self._eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The module's hidden states before its norm, [N, hidden] -> fp32 [N, vocab], by the target's head."""
        return self._target.head(self.norm(hidden)).float()
