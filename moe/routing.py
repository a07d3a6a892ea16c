"""Which experts a token goes to, and with which weights."""

from dataclasses import dataclass
from typing import Literal

import torch


@dataclass(frozen=True, kw_only=True)
class Router:
    """The routers of DeepSeek-V2 (2405.04434, section 2.2) and V3 (2412.19437, eq. 12-16).

    scoring "softmax" or "sigmoid" of the logits. Selection of `top_k` of all experts ("greedy"), of the `top_groups`
    groups whose best expert scores highest ("group_limited_greedy"), or of those whose two best biased scores have the
    highest sum ("noaux_tc"; the bias counts for selection only). The weights are the unbiased scores, renormalised over
    the chosen ones when `norm_topk_prob`, times `routed_scaling_factor`.
    """

    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    selection: Literal["greedy", "group_limited_greedy", "noaux_tc"]
    groups: int
    top_groups: int
    norm_topk_prob: bool
    routed_scaling_factor: float

    def __call__(self, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """logits: fp32 [tokens, experts]; bias: fp32 [experts] for "noaux_tc".

        Returns the chosen experts, int64 [tokens, top_k], and their weights, fp32 [tokens, top_k].
        """
        scores = logits.softmax(-1) if self.scoring == "softmax" else logits.sigmoid()
        biased = scores if bias is None else scores + bias
        if self.selection != "greedy" and self.top_groups < self.groups:
            biased = self._keep_best_groups(biased)
        experts = biased.topk(self.top_k, -1, sorted=False).indices
        weights = scores.gather(-1, experts)
        if self.norm_topk_prob:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        if self.routed_scaling_factor != 1.0:
            weights = weights * self.routed_scaling_factor
        return experts, weights

    def _keep_best_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """-inf for every expert outside the best groups (as in DeepSeek's own code)."""
        grouped = scores.view(scores.shape[0], self.groups, scores.shape[1] // self.groups)
        if self.selection == "noaux_tc":
            group_scores = grouped.topk(2, -1, sorted=False).values.sum(-1)
        else:
            group_scores = grouped.amax(-1)
        best = group_scores.topk(self.top_groups, -1, sorted=False).indices
        rejected = torch.ones_like(group_scores, dtype=torch.bool).scatter_(-1, best, False)
        return grouped.masked_fill(rejected[..., None], float("-inf")).flatten(-2)
