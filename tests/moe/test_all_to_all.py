"""Tokens that travel between real processes come back as one rank would have computed them."""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints import make_deepseek_v3
from support.processes import Processes, processes
from support.travels import Call, Trip, interleave, layer_output, posted, travel

from raysonar.moe.communicator import Wire
from raysonar.moe.payload import RowFormat

EXACT = {"wire": Wire(padded_bytes=0), "slack": 1}
PADDED = {"wire": Wire(padded_bytes=1 << 20), "slack": 2}
TIGHT = {"wire": Wire(padded_bytes=1 << 20), "slack": 0}
UNKNOWN = {"wire": Wire(padded_bytes=1 << 20), "slack": None}
BACKENDS = {"exact": EXACT, "padded": PADDED, "padded to the brim": TIGHT, "rooms unknown": UNKNOWN}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(2, tmp_path_factory.mktemp("two")) as group:
        yield group


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    with processes(4, tmp_path_factory.mktemp("four")) as group:
        yield group


def check(group: Processes, trips: list[Trip]) -> list[list[list[Call]]]:
    """Every rank's tokens come back as one rank computes them; the collectives by trip and rank."""
    by_rank = group(travel, trips)
    for index, trip in enumerate(trips):
        out = torch.cat([outcomes[index][0] for outcomes in by_rank])
        torch.testing.assert_close(out, trip.of_one_rank(), rtol=1e-5, atol=1e-5, msg=lambda m, t=trip: f"{t}: {m}")
    return [[outcomes[index][1] for outcomes in by_rank] for index in range(len(trips))]


TRIPS_OF_TWO = [
    Trip((7, 4)),
    Trip((6, 0)),
    Trip((0, 0)),
    Trip((1, 9), routing="one rank"),
    Trip((5, 5), routing="not the last rank"),
    Trip((8, 3), experts=7, top_k=3),
    Trip((1, 1), experts=2, top_k=1),
    Trip((4, 6), experts=3, top_k=3, hidden=33),
    Trip((9,), tensor=2),
    Trip((1,), tensor=2),
]
TRIPS_OF_FOUR = [
    Trip((9, 3, 0, 1)),
    Trip((0, 0, 12, 0), top_k=2, routing="one rank"),
    Trip((3, 3, 3, 3), top_k=2, routing="not the last rank"),
    Trip((2, 5, 1, 4), experts=5, top_k=2),  # 2, 2, 1 and no experts
    Trip((7, 4), tensor=2),
    Trip((1, 0), tensor=2, experts=6),
    Trip((10,), tensor=4),
]


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_ranks_give_what_one_rank_gives(two: Processes, backend: str) -> None:
    calls = check(two, [replace(t, seed=i, **BACKENDS[backend]) for i, t in enumerate(TRIPS_OF_TWO)])
    assert_exchanges(calls, sizes=backend in ("exact", "rooms unknown"))


@pytest.mark.parametrize("backend", BACKENDS)
def test_four_ranks_give_what_one_rank_gives(four: Processes, backend: str) -> None:
    calls = check(four, [replace(t, seed=i, **BACKENDS[backend]) for i, t in enumerate(TRIPS_OF_FOUR)])
    assert_exchanges(calls, sizes=backend in ("exact", "rooms unknown"))


def assert_exchanges(calls: list[list[list[Call]]], *, sizes: bool) -> None:
    """Of every trip and rank: one transfer there and one back, after an exchange of sizes or without one."""
    expected = ["counts"] * sizes + ["exchange", "exchange"]
    assert [[[call[0] for call in rank] for rank in trip] for trip in calls] == [[expected] * len(t) for t in calls]


def test_a_token_travels_once_to_a_rank_however_many_of_its_experts_it_needs(four: Processes) -> None:
    trip = Trip((6, 5, 4, 3), experts=16, top_k=4, routing="each to one rank", **EXACT)
    [calls] = check(four, [trip])
    _, chosen, _ = trip.inputs()
    for rank, own in enumerate(trip.slices()):
        needed = [{expert // 4 for expert in row} for row in chosen[own].tolist()]
        assert all(len(ranks) == 1 for ranks in needed)
        expected = [sum(to in ranks for ranks in needed) for to in range(4)]
        there, back = [call for call in calls[rank] if call[0] == "exchange"]
        assert there[1] == expected
        assert back[2] == expected


def test_exact_sends_what_is_needed_and_padded_the_room_that_the_plan_gives(four: Processes) -> None:
    trip = Trip((6, 0, 2, 3), experts=16, top_k=2)
    exact, padded = check(four, [replace(trip, **EXACT), replace(trip, **PADDED)])
    _, chosen, _ = trip.inputs()
    room = [count + 2 for count in trip.tokens]
    for rank, own in enumerate(trip.slices()):
        needed = [{expert // 4 for expert in row} for row in chosen[own].tolist()]
        assert exact[rank][1][1] == [sum(to in ranks for ranks in needed) for to in range(4)]
        assert padded[rank][0] == ("exchange", [room[rank]] * 4, room)
        assert padded[rank][1][1] == room  # the combine's blocks, the other way round


def test_all_ranks_choose_by_what_the_fullest_rank_would_send_in_vain(four: Processes) -> None:
    trip = Trip((1, 40, 0, 2), slack=0)
    row = RowFormat(hidden=trip.hidden, top_k=trip.top_k, dtype=trip.dtype, float8=False).row_bytes
    in_vain = 3 * 40 * row * 0.75**trip.top_k
    trips = [replace(trip, wire=Wire(padded_bytes=limit)) for limit in (math.ceil(in_vain), math.floor(in_vain) - 1)]
    padded, exact = check(four, trips)
    assert_exchanges([padded], sizes=False)
    assert_exchanges([exact], sizes=True)
    sliced = Trip((40, 3), tensor=2, slack=0, wire=Wire(padded_bytes=math.ceil(in_vain / 2)))
    assert_exchanges(check(four, [sliced]), sizes=False)


@pytest.mark.parametrize("backends", [("exact", "exact"), ("padded", "padded"), ("padded", "exact")])
def test_two_halves_in_different_states_do_not_disturb_each_other(four: Processes, backends: tuple[str, str]) -> None:
    shapes = Trip((5, 2, 0, 3), seed=1), Trip((1, 4, 6, 2), seed=2)
    halves = [replace(trip, **BACKENDS[backend]) for trip, backend in zip(shapes, backends, strict=True)]
    for seed in range(8):
        by_rank = four(interleave, halves, seed)
        for half, trip in enumerate(halves):
            out = torch.cat([outs[half] for outs in by_rank])
            torch.testing.assert_close(out, trip.of_one_rank(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["exact", "padded"])
def test_receives_are_posted_before_sends_and_each_half_has_its_own_process_group(
    four: Processes, backend: str
) -> None:
    for batches in four(posted, Trip((5, 5, 5, 5), top_k=4, **BACKENDS[backend])):
        assert len(batches) == 4  # there and back, twice
        for batch in batches:
            kinds = [kind for kind, _ in batch]
            assert kinds == sorted(kinds)  # irecv, isend
            assert {"irecv", "isend"} == set(kinds)
        groups = [{name for _, name in batch} for batch in batches]
        assert all(len(names) == 1 for names in groups)
        assert len(set.union(*groups)) == 2


@pytest.mark.parametrize("backend", ["exact", "padded"])
def test_fp8_tokens_are_what_is_left_of_them_after_rounding_on_whichever_rank(two: Processes, backend: str) -> None:
    """The tokens that stay on their rank, too: a token's outcome does not depend on where its experts are."""
    trips = [Trip((7, 4), hidden=200), Trip((0, 3), hidden=128), Trip((5,), tensor=2, hidden=30)]
    how = BACKENDS[backend]
    fp8 = [replace(trip, **how | {"wire": replace(how["wire"], float8=True)}) for trip in trips]
    check(two, fp8)
    for rounded, trip in zip(fp8, trips, strict=True):
        error = (rounded.of_one_rank() - trip.of_one_rank()).norm() / trip.of_one_rank().norm()
        assert 0.002 < error < 0.05


@pytest.mark.parametrize(("hidden", "top_k"), [(7168, 8), (2048, 6)])
def test_fp8_halves_the_bytes_of_a_dispatch(hidden: int, top_k: int) -> None:
    bf16, fp8 = (
        RowFormat(hidden=hidden, top_k=top_k, dtype=torch.bfloat16, float8=float8).row_bytes for float8 in (False, True)
    )
    assert fp8 / bf16 < 0.53
    assert fp8 == hidden + 4 * math.ceil(hidden / 128) + 8 * top_k


def test_a_layers_output_with_fp8_dispatch_is_within_4_percent_of_bf16s(two: Processes, tmp_path: Path) -> None:
    folder = make_deepseek_v3(tmp_path / "model", num_hidden_layers=1, first_k_dense_replace=0, hidden_size=192)
    bf16, fp8 = torch.cat(two(layer_output, folder, False)), torch.cat(two(layer_output, folder, True))
    error = ((fp8 - bf16).float().norm() / bf16.float().norm()).item()
    assert 0 < error < 4e-2


def test_more_tokens_than_the_plan_has_room_for_are_an_error(two: Processes) -> None:
    with pytest.raises(AssertionError, match="5 tokens to dispatch, and the plan has room for 4"):
        two(travel, [Trip((5, 5), slack=-1, wire=Wire(padded_bytes=1 << 20))])


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_behind_the_tokens_are_nobodys(float8: bool, dtype: torch.dtype) -> None:
    row = RowFormat(hidden=131, top_k=3, dtype=dtype, float8=float8)
    hidden, experts, weights = torch.randn(2, 131).to(dtype), torch.tensor([[0, 4, 7], [5, 3, 6]]), torch.rand(2, 3)
    routed = row.unpack(row.pack(hidden, experts, weights, rows=4), slice(4, 7))
    assert routed.experts.tolist() == [[-1, 0, -1], [1, -1, 2], [-1, -1, -1], [-1, -1, -1]]
    assert torch.equal(routed.weights[:2], weights)
    assert routed.hidden.dtype == dtype
    torch.testing.assert_close(routed.hidden[:2], hidden, rtol=0.07 if float8 else 0, atol=0.01 if float8 else 0)
    assert not routed.hidden[2:].any()
    assert row.pack(hidden[:0], experts[:0], weights[:0], rows=0).shape == (0, row.row_bytes)
