"""The MTP module of DeepSeek-V3 (2412.19437, section 2.2), written out plainly; the block is transformers' layer.

    h'_i = block( eh_proj [ enorm(embedding of t_{i+1}) ; hnorm(h_i) ] )
    logits of t_{i+2} = head(shared_head.norm(h'_i))

with the embedding first, as vLLM, SGLang and TensorRT-LLM have it. No cache: the whole sequence at once.
"""

from pathlib import Path

import torch
from support.checkpoints import read_weights
from torch import nn
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RotaryEmbedding


class MtpReference:
    """Module number `module` of the folder, in fp32, by its own copies of embedding and head."""

    def __init__(self, folder: Path, module: int = 0) -> None:
        self._config = AutoConfig.from_pretrained(folder)
        self._config._attn_implementation = "eager"
        prefix = f"model.layers.{self._config.num_hidden_layers + module}."
        stored = read_weights(folder)
        self._weights = {name.removeprefix(prefix): t.float() for name, t in stored.items() if name.startswith(prefix)}
        self._block = DeepseekV3DecoderLayer(self._config, self._config.num_hidden_layers + module).eval()
        self._block.load_state_dict(self._block_state())
        self._rotary = DeepseekV3RotaryEmbedding(self._config)

    @torch.inference_mode()
    def __call__(self, next_tokens: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """next_tokens: int64 [S], token i + 1 at place i; hidden: fp32 [S, hidden], h_i at place i.

        Returns the module's hidden states before its norm, [S, hidden], and its logits, [S, vocab].
        """
        length = len(next_tokens)
        embedded = self._norm("enorm", self._weights["embed_tokens.weight"][next_tokens])
        x = torch.cat([embedded, self._norm("hnorm", hidden)], -1) @ self._weights["eh_proj.weight"].T
        positions = torch.arange(length)[None]
        causal = torch.full((length, length), float("-inf")).triu(1)[None, None]
        out = self._block(
            x[None],
            attention_mask=causal,
            position_ids=positions,
            position_embeddings=self._rotary(x[None], positions),
        )[0]
        return out, self.logits(out)

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """[S, hidden] before the module's norm -> [S, vocab]."""
        return self.norm(out) @ self._weights["shared_head.head.weight"].T

    def norm(self, out: torch.Tensor) -> torch.Tensor:
        return self._norm("shared_head.norm", out)

    def _norm(self, name: str, x: torch.Tensor) -> torch.Tensor:
        return (
            x
            * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._config.rms_norm_eps)
            * self._weights[f"{name}.weight"]
        )

    def _block_state(self) -> dict[str, torch.Tensor]:
        """The block's tensors under the names of transformers' layer, which stacks the experts."""
        own = ("enorm", "hnorm", "eh_proj", "embed_tokens", "shared_head")
        state = {n: t for n, t in self._weights.items() if not n.startswith(own) and ".experts." not in n}
        if isinstance(self._block.mlp, nn.Module) and hasattr(self._block.mlp, "experts"):
            experts = [f"mlp.experts.{e}." for e in range(self._config.n_routed_experts)]
            state["mlp.experts.gate_up_proj"] = torch.stack(
                [torch.cat([self._weights[f"{e}{p}_proj.weight"] for p in ("gate", "up")]) for e in experts]
            )
            state["mlp.experts.down_proj"] = torch.stack([self._weights[f"{e}down_proj.weight"] for e in experts])
        return state
