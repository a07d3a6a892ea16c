"""The endurance benchmark sees what leaks."""

import pytest
from endurance.__main__ import compare, faults
from endurance.footprint import Footprint

NAMES = ("driver 0", "rank 0", "raylet 0")
IDLE = {"num_requests_running": 0.0, "kv_cache_usage_perc": 0.0}


def hour(growth: float, of: str) -> list[dict[str, Footprint]]:
    """Samples: one process grows steadily by so much in the last three quarters."""
    return [
        {name: Footprint(400 * (1 + growth * at / 75 * (name == of)), 70) for name in NAMES} for at in range(-25, 75)
    ]


def held(files: int) -> dict[str, Footprint]:
    return {name: Footprint(400, files) for name in NAMES}


@pytest.mark.parametrize(
    ("growth", "of", "files", "left", "said"),
    [
        (0.04, "driver 0", 70, {}, []),
        (0.08, "rank 0", 70, {}, ["rank 0 grew by"]),
        (0.5, "raylet 0", 70, {}, []),
        (0.0, "rank 0", 90, {}, ["driver 0 has more files open", "rank 0 has more files open"]),
        (0.0, "rank 0", 70, {"num_requests_running": 1.0}, ["num_requests_running is 1.0 at rest"]),
    ],
)
def test_growth_open_files_and_what_is_held_at_rest_are_said(
    growth: float, of: str, files: int, left: dict[str, float], said: list[str]
):
    rows = compare(hour(growth, of), held(70), held(files), warm=0.25)
    leaks = faults(rows, IDLE | left)
    assert len(leaks) == len(said)
    assert all(leak.startswith(start) for leak, start in zip(leaks, said, strict=True))


def test_a_process_that_was_replaced_is_not_passed_over():
    samples = [{**held(70)} for _ in range(20)]
    samples[-1].pop("rank 0")
    with pytest.raises(RuntimeError, match="rank 0 was not there all the time"):
        compare(samples, held(70), held(70), warm=0.25)
