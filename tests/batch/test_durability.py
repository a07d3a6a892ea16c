"""Every row exactly once, whenever the process dies; in constant memory."""

import json
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from support.scripted_batch import WINDOW, Death, in_a_process, run_job, weigh_job, write_rows

ROWS = 150
ROWS_A_PART = 40
REPLICAS = 2

deaths = st.one_of(
    st.builds(Death, st.just("write"), st.integers(1, 30), st.floats(0, 1)),
    st.builds(Death, st.just("fsync"), st.integers(1, 12)),
    st.builds(Death, st.just("replace"), st.integers(1, 3)),
)


def output(folder: Path) -> list[str]:
    """The custom ids of the output's rows, after a look into each."""
    rows = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    for row in rows:
        assert row["response"]["body"]["choices"][0]["text"] == f"prompt {row['custom_id'][1:]}"
    return [row["custom_id"] for row in rows]


@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(deaths, min_size=1, max_size=3), st.booleans(), st.integers(0, 1000))
@example([Death("write", 2, 0.5), Death("replace", 2)], True, 1)
@example([Death("replace", 3)], False, 2)
def test_a_job_that_is_killed_at_any_time_ends_with_every_row_once(
    tmp_path: Path, kills: list[Death], ordered: bool, seed: int
):
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    write_rows(tmp_path / "in.jsonl", ROWS)
    killed = 0
    for death in kills:
        status = in_a_process(run_job, tmp_path, seed, ROWS_A_PART, death, ordered)
        assert status in (0, -signal.SIGKILL)
        killed += status != 0
    assert in_a_process(run_job, tmp_path, seed, ROWS_A_PART, None, ordered) == 0
    ids = output(tmp_path)
    assert sorted(ids, key=lambda each: int(each[1:])) == [f"c{index}" for index in range(ROWS)]
    if ordered:
        assert ids == [f"c{index}" for index in range(ROWS)]
    answers = Counter((tmp_path / "answered").read_text().split())
    assert len(answers) == ROWS
    assert answers.total() - ROWS <= killed * REPLICAS * WINDOW, "more was repeated than was in flight"


def test_deaths_do_kill(tmp_path: Path):
    write_rows(tmp_path / "in.jsonl", ROWS)
    status = in_a_process(run_job, tmp_path, 0, ROWS_A_PART, Death("write", 2, 0.5), True)
    assert status == -signal.SIGKILL
    assert not (tmp_path / "out.jsonl").exists()
    [part] = (tmp_path / "out.jsonl.ledger").glob("part-*")
    assert not part.read_bytes().endswith(b"\n"), "the last line is torn"


@pytest.mark.timeout(600)
def test_a_hundred_thousand_rows_are_answered_once_each_in_constant_memory(tmp_path: Path):
    rows = 100_000
    write_rows(tmp_path / "in.jsonl", rows)
    assert in_a_process(weigh_job, tmp_path, 1024, tmp_path / "weights") == 0
    result = json.loads((tmp_path / "weights").read_text())
    assert result["most_held"] == 256
    weights = result["weights"]
    assert len(weights) > 50
    assert max(weights[10:]) - weights[10] < 8 << 20, f"memory grew from {weights[10]} to {max(weights)} bytes"
    with (tmp_path / "out.jsonl").open() as lines:
        for index, line in enumerate(lines):
            assert json.loads(line)["custom_id"] == f"c{index}"
    assert index == rows - 1
