"""The mixture-of-experts network of a layer."""

from collections.abc import Generator

import torch

from raysonar.model.batch import Batch
from raysonar.model.mlp import Mlp
from raysonar.model.spec import MoeSpec
from raysonar.model.weights import WHOLE, Weights
from raysonar.moe.all_to_all import Tokens, dispatch
from raysonar.moe.executor import Pass
from raysonar.moe.experts import Experts
from raysonar.moe.placement import Placement, initial_placement
from raysonar.moe.routing import Router
from raysonar.observe.timeline import Track


class Moe:
    """Routed experts, spread over all ranks, plus shared ones that see every token (2412.19437, section 2.1.2).

    The ranks of a data-parallel row hold the same tokens: each dispatches its own share of them, computes the shared
    experts for it, and the shares are put together at the end. Where experts have several replicas, tokens take turns
    among them.
    """

    def __init__(self, hidden: int, spec: MoeSpec, weights: Weights, prefix: str) -> None:
        self._communicators, self._spec, self._hidden, self._prefix = weights.communicators, spec, hidden, prefix
        place = weights.place
        counted = 0 if weights.redundant_experts is None else spec.experts
        self.load = torch.zeros(counted, dtype=torch.int64, device=weights.device)
        """Tokens of this rank by expert, since it was last set to zero; [0] when experts cannot move."""
        self.placement = initial_placement(spec.experts, place.world, weights.redundant_experts or 0)
        self._replicas = self._index_replicas()
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
        self._experts = Experts(self.placement.per_rank)
        own = self.placement.own(place.rank)
        for expert in range(spec.experts):
            if expert in own:
                self._load_expert(weights, expert, own.index(expert))
            else:
                for part in ("gate_proj", "up_proj", "down_proj"):
                    weights.reader.skip(f"{prefix}.experts.{expert}.{part}.weight")
        shared = spec.shared_experts * spec.intermediate
        self._shared = Mlp(hidden, shared, weights, f"{prefix}.shared_experts", WHOLE) if shared else None

    def _load_expert(self, weights: Weights, expert: int, slot: int) -> None:
        name, rows = f"{self._prefix}.experts.{expert}.", self._spec.intermediate
        gate_up = [(f"{name}gate_proj.weight", rows), (f"{name}up_proj.weight", rows)]
        down = weights.tensor(f"{name}down_proj.weight", self._hidden, rows)
        self._experts.put(slot, weights.stacked(gate_up, self._hidden), down)

    def move(self, placement: Placement, weights: Weights) -> int:
        """Take up a new placement, the same on all ranks, between two steps. Returns how many experts were read."""
        rank = weights.place.rank
        before, after = self.placement.own(rank), placement.own(rank)
        moved = [slot for slot, expert in enumerate(after) if expert >= 0 and expert != before[slot]]
        for slot in moved:
            self._load_expert(weights, after[slot], slot)
        self.placement = placement
        self._replicas = self._index_replicas()
        return len(moved)

    def _index_replicas(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The slots of each expert, repeated, int64 [experts, most], and how many it has, int64 [experts].

        None when every expert is in the slot of its own number.
        """
        slots, device = self.placement.slots_of(self._spec.experts), self.load.device
        if slots == [[expert] for expert in range(self._spec.experts)]:
            return None
        table = [[own[turn % len(own)] for turn in range(max(map(len, slots)))] for own in slots]
        return torch.tensor(table, device=device), torch.tensor([len(own) for own in slots], device=device)

    def _slots(self, experts: torch.Tensor) -> torch.Tensor:
        """The slots that tokens go to for their experts, int64 [tokens, top_k]; each token its turn among replicas."""
        if len(self.load):
            self.load += torch.bincount(experts.flatten(), minlength=len(self.load))
        if self._replicas is None:
            return experts
        table, counts = self._replicas
        turn = torch.arange(len(experts), device=experts.device)[:, None] % counts[experts]
        return table[experts, turn]

    def __call__(self, x: torch.Tensor, batch: Batch) -> Pass:
        """[tokens, hidden] -> [tokens, hidden]; yields while tokens travel."""
        communicator = self._communicators[batch.half]
        track = communicator.track
        part = x[communicator.place.share(len(x))]
        with track.span("router"):
            experts, weights = self._route(torch.mm(part.float(), self._gate.T), self._bias)
        if communicator.place.world == 1:
            with track.span("experts"):
                out = self._experts(part, experts, weights)
            return out if (shared := self._share(part, track)) is None else out + shared
        out = yield from self._travel(part, self._slots(experts), weights, batch)
        return communicator.gather_over_row(out, len(x), dim=0)

    def _travel(
        self, part: torch.Tensor, slots: torch.Tensor, weights: torch.Tensor, batch: Batch
    ) -> Generator[None, None, torch.Tensor]:
        """The experts of all ranks on this rank's tokens, and this rank's experts on all ranks' tokens."""
        communicator = self._communicators[batch.half]
        track = communicator.track
        tokens = Tokens(hidden=part, experts=slots, weights=weights, total_experts=len(self.placement.experts))
        sent = yield from dispatch(communicator, tokens, batch.capacities)
        shared = self._share(part, track)
        yield
        routed = sent.wait()
        with track.span("experts"):
            combine = sent.combine(self._experts(routed.hidden, routed.experts, routed.weights))
        yield
        out = combine.wait()
        return out if shared is None else out + shared

    def _share(self, x: torch.Tensor, track: Track) -> torch.Tensor | None:
        """The shared experts' output, where there are any."""
        if self._shared is None:
            return None
        with track.span("shared expert"):
            return self._shared(x)
