"""Placement of experts: complete, even, and no more moves than it needs."""

from hypothesis import given
from hypothesis import strategies as st

from raysonar.moe.placement import GAIN, balanced_placement, initial_placement

layouts = st.tuples(st.integers(1, 24), st.integers(1, 6), st.integers(0, 8))


@st.composite
def loaded_layouts(draw: st.DrawFn) -> tuple[tuple[int, int, int], list[float]]:
    experts, ranks, redundant = draw(layouts)
    loads = draw(st.lists(st.integers(0, 10_000), min_size=experts, max_size=experts))
    return (experts, ranks, redundant), [float(load) for load in loads]


@given(loaded_layouts())
def test_every_expert_has_a_slot_and_no_rank_more_than_its_share(
    case: tuple[tuple[int, int, int], list[float]],
) -> None:
    (experts, ranks, redundant), loads = case
    first = initial_placement(experts, ranks, redundant)
    again = balanced_placement(loads, first)
    for placement in (first, again):
        assert len(placement.experts) == ranks * placement.per_rank
        assert ranks * placement.per_rank >= experts + redundant
        assert all(placement.slots_of(experts))
    assert again.imbalance(loads) <= first.imbalance(loads)
    assert balanced_placement(loads, again) == again or balanced_placement(loads, again).imbalance(
        loads
    ) < again.imbalance(loads)


@given(loaded_layouts())
def test_the_busiest_rank_is_at_most_one_replica_above_the_mean(
    case: tuple[tuple[int, int, int], list[float]],
) -> None:
    """Greedy packing's bound, where slots do not force a rank's hand: no rank exceeds the mean by a whole replica."""
    (experts, ranks, _), loads = case
    placement = balanced_placement(loads, initial_placement(experts, ranks, experts * (ranks - 1)))
    slots = placement.slots_of(experts)
    heaviest = max(loads) / ranks  # there are slots for a replica of every expert on every rank
    mean = sum(loads) / ranks
    carried = [sum(loads[e] / len(slots[e]) for e in placement.own(rank)) for rank in range(ranks)]
    assert max(carried) <= (mean + heaviest) / (1 - GAIN) + 1e-6


def test_without_loads_to_even_out_nothing_moves() -> None:
    first = initial_placement(8, 4, 0)
    assert balanced_placement([5.0] * 8, first).experts == first.experts


def test_the_hottest_expert_is_replicated_on_other_ranks() -> None:
    loads = [1.0, 1, 100, 1, 1, 1, 1, 1]
    first = initial_placement(8, 2, 2)
    placement = balanced_placement(loads, first)
    ranks = {slot // placement.per_rank for slot in placement.slots_of(8)[2]}
    assert ranks == {0, 1}
    assert placement.imbalance(loads) < 1.1 < first.imbalance(loads)
