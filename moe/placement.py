"""Where the experts of a layer are: replicas of the hottest, spread so that every rank has about the same to do."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

GAIN = 0.05
"""Moving experts costs a pause: a new placement must make the busiest rank's load this much smaller."""


@dataclass(frozen=True)
class Placement:
    """The experts of one layer in the slots of all ranks.

    Slot s is slot s % per_rank of rank s // per_rank.
    """

    experts: tuple[int, ...]
    """[ranks * per_rank]: the expert in each slot, -1 for an empty one. Every expert is in at least one."""
    per_rank: int

    @property
    def ranks(self) -> int:
        """Ranks that share the experts."""
        return len(self.experts) // self.per_rank

    def own(self, rank: int) -> tuple[int, ...]:
        """The experts in a rank's slots."""
        return self.experts[rank * self.per_rank : (rank + 1) * self.per_rank]

    def slots_of(self, count: int) -> list[list[int]]:
        """The slots of each of `count` experts."""
        slots: list[list[int]] = [[] for _ in range(count)]
        for slot, expert in enumerate(self.experts):
            if expert >= 0:
                slots[expert].append(slot)
        return slots

    def by_rank(self, loads: Sequence[float]) -> list[float]:
        """Each rank's load, when an expert's load is shared evenly by its replicas."""
        slots = self.slots_of(len(loads))
        return [
            sum(loads[expert] / len(slots[expert]) for expert in self.own(rank) if expert >= 0)
            for rank in range(self.ranks)
        ]

    def imbalance(self, loads: Sequence[float]) -> float:
        """The busiest rank's load over the mean; 1 is best."""
        total = sum(loads)
        return max(self.by_rank(loads)) * self.ranks / total if total else 1.0


def initial_placement(experts: int, ranks: int, redundant: int) -> Placement:
    """In order, the same number of slots on each rank, for `experts + redundant` or a few more.

    Spare slots are filled with the experts that follow, so that a rank has at once what it will always have; slots that
    are left when a rank has every expert, or without `redundant`, are empty.
    """
    per_rank = -(-(experts + redundant) // ranks)
    plain = -(-experts // ranks)
    slots: list[int] = []
    for rank in range(ranks):
        end = min((rank + 1) * plain, experts)
        own = list(range(min(rank * plain, experts), end))
        spare = per_rank - len(own) if redundant else 0
        own += [(end + i) % experts for i in range(min(spare, experts - len(own)))]
        slots += own + [-1] * (per_rank - len(own))
    return Placement(tuple(slots), per_rank)


def balanced_placement(loads: Sequence[float], current: Placement) -> Placement:
    """A placement for these loads (tokens by expert); `current` itself unless another is better by GAIN.

    Spare slots go one by one to the expert with the most load per replica, at most one replica a rank; then the
    replicas, the heaviest first, to the rank with the least load that has a slot free and, if one can be had, no
    replica of the same expert. An expert that stays on its rank stays in its slot.
    """
    counts = _replicas(loads, len(current.experts), current.ranks)
    replicas = sorted(
        ((loads[expert] / count, expert) for expert, count in enumerate(counts) for _ in range(count)),
        key=lambda replica: (-replica[0], replica[1]),
    )
    chosen: list[list[int]] = [[] for _ in range(current.ranks)]
    carried = [0.0] * current.ranks
    for load, expert in replicas:
        free = [rank for rank in range(current.ranks) if len(chosen[rank]) < current.per_rank]
        apart = [rank for rank in free if expert not in chosen[rank]]
        rank = min(apart or free, key=lambda each: (carried[each], expert not in current.own(each), each))
        chosen[rank].append(expert)
        carried[rank] += load
    slots: list[int] = []
    for rank, experts in enumerate(chosen):
        slots += _in_place(experts, current.own(rank))
    placement = Placement(tuple(slots), current.per_rank)
    return placement if placement.imbalance(loads) < (1 - GAIN) * current.imbalance(loads) else current


def _replicas(loads: Sequence[float], slots: int, ranks: int) -> list[int]:
    """How many slots each expert gets: one, and of the spare ones by its load."""
    counts = [1] * len(loads)
    heap = [(-load, expert) for expert, load in enumerate(loads)] if ranks > 1 else []
    heapq.heapify(heap)
    for _ in range(slots - len(loads)):
        if not heap:
            break  # every expert is everywhere
        _, expert = heapq.heappop(heap)
        counts[expert] += 1
        if counts[expert] < ranks:
            heapq.heappush(heap, (-loads[expert] / counts[expert], expert))
    return counts


def _in_place(experts: Sequence[int], before: Sequence[int]) -> list[int]:
    """`experts` in as many slots as `before`, those that were there in their old slots."""
    coming = list(experts)
    slots = [-1] * len(before)
    for slot, expert in enumerate(before):
        if expert in coming:
            coming.remove(expert)
            slots[slot] = expert
    for slot in range(len(slots)):
        if slots[slot] < 0 and coming:
            slots[slot] = coming.pop(0)
    return slots
