"""The mixture-of-experts network of a layer."""

from collections.abc import Generator

import torch

from raysonar.model.mlp import Mlp
from raysonar.model.spec import MoeSpec
from raysonar.model.weights import WHOLE, Weights
from raysonar.moe.all_to_all import Dispatch
from raysonar.moe.communicator import share
from raysonar.moe.executor import Pass
from raysonar.moe.experts import Experts
from raysonar.moe.routing import Router
from raysonar.observe.timeline import Track


class Moe:
    """Routed experts, spread over all ranks, plus shared ones that see every token (2412.19437, section 2.1.2).

    The ranks of a data-parallel row hold the same tokens: each dispatches its own share of them, computes the shared
    experts for it, and the shares are put together at the end.
    """

    def __init__(self, hidden: int, spec: MoeSpec, weights: Weights, prefix: str) -> None:
        self._communicators, self._total = weights.communicators, spec.experts
        self._gate = weights.tensor(f"{prefix}.gate.weight", spec.experts, hidden, dtype=torch.float32)
        self._bias: torch.Tensor | None = None
        if spec.selection == "noaux_tc":
            name = f"{prefix}.gate.e_score_correction_bias"
            self._bias = weights.tensor(name, spec.experts, dtype=torch.float32)
        self._route = Router(
            top_k=spec.top_k,
            scoring=spec.scoring,
            selection=spec.selection,
            groups=spec.groups,
            top_groups=spec.top_groups,
            norm_topk_prob=spec.norm_topk_prob,
            routed_scaling_factor=spec.routed_scaling_factor,
        )
        own = share(spec.experts, weights.place.world, weights.place.rank)
        names = [f"{prefix}.experts.{expert}." for expert in range(spec.experts)]
        for name in names[: own.start] + names[own.stop :]:
            for part in ("gate_proj", "up_proj", "down_proj"):
                weights.reader.skip(f"{name}{part}.weight")
        names, rows = names[own], spec.intermediate
        self._experts = Experts(  # read one by one: a layer's experts are never held twice, plain and packed
            (weights.stacked([(f"{n}gate_proj.weight", rows), (f"{n}up_proj.weight", rows)], hidden) for n in names),
            (weights.tensor(f"{n}down_proj.weight", hidden, rows) for n in names),
        )
        shared = spec.shared_experts * spec.intermediate
        self._shared = Mlp(hidden, shared, weights, f"{prefix}.shared_experts", WHOLE) if shared else None

    def __call__(self, x: torch.Tensor, half: int) -> Pass:
        """[tokens, hidden] -> [tokens, hidden]; yields while tokens travel."""
        communicator = self._communicators[half]
        track = communicator.track
        part = x[communicator.place.share(len(x))]
        with track.span("router"):
            experts, weights = self._route(torch.mm(part.float(), self._gate.T), self._bias)
        if communicator.place.world == 1:
            with track.span("experts"):
                out = self._experts(part, experts, weights)
            return out if (shared := self._share(part, track)) is None else out + shared
        out = yield from self._travel(part, experts, weights, half)
        return communicator.gather_over_row(out, len(x), dim=0)

    def _travel(
        self, part: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor, half: int
    ) -> Generator[None, None, torch.Tensor]:
        """The experts of all ranks on this rank's tokens, and this rank's experts on all ranks' tokens."""
        communicator = self._communicators[half]
        track = communicator.track
        with track.span("send to experts"):
            dispatch = Dispatch(communicator, hidden=part, experts=experts, weights=weights, total_experts=self._total)
        shared = self._share(part, track)
        yield
        routed = dispatch.wait()
        with track.span("experts"):
            combine = dispatch.combine(self._experts(routed.hidden, routed.experts, routed.weights))
        yield
        out = combine.wait()
        return out if shared is None else out + shared

    def _share(self, x: torch.Tensor, track: Track) -> torch.Tensor | None:
        """The shared experts' output, where there are any."""
        if self._shared is None:
            return None
        with track.span("shared expert"):
            return self._shared(x)
