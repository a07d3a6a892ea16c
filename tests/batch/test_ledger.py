"""The ledger: what it keeps, what it drops, and what it refuses."""

import json
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raysonar.batch.ledger import Ledger
from raysonar.batch.outcome import Outcome, answered, refused
from raysonar.batch.parts import pack, unpack
from raysonar.batch.place import Place
from raysonar.batch.rows import Row
from raysonar.errors import ConfigurationError

JOB = {"input": {"mark": "abc"}, "parameters": {"temperature": 0.0}}
ROWS = [Row(index, b"") for index in range(10)]


def outcome(index: int) -> Outcome:
    return answered(ROWS[index], f"c{index}", 200, {"choices": [{"text": f"text {index}"}]})


def begin(folder: Path, job: dict[str, object] = JOB, *, name: str = "out.jsonl", restart: bool = False) -> Ledger:
    return Ledger(Place.of(str(folder / name)), job, restart=restart, rows_a_part=4)


def finish(ledger: Ledger, order: list[int], *, ordered: bool = True) -> None:
    """Do the rows in an order, to the end."""
    done = [0]
    pending = [row.index for row in ledger.pending(ROWS, done)]
    assert done[0] + len(pending) == len(ROWS)
    ledger.add(outcome(index) for index in order if index in pending)
    ledger.finish(len(ROWS), ordered=ordered)
    ledger.release()


def ids(folder: Path) -> list[str]:
    return [json.loads(line)["custom_id"] for line in (folder / "out.jsonl").read_text().splitlines()]


@given(st.integers(0, 400), st.binary(max_size=40))
def test_a_torn_end_is_dropped_and_nothing_before_it(cut: int, garbage: bytes):
    outcomes = [outcome(index) for index in range(3)]
    data = b"".join(pack(each) for each in outcomes)
    whole, end = unpack(data)
    assert end == len(data)
    assert whole == [Outcome(each.index, 200, each.line) for each in outcomes]
    kept, end = unpack(data[: min(cut, len(data))] + garbage)
    lengths = [len(b"".join(pack(each) for each in outcomes[:count])) for count in range(4)]
    assert end in lengths
    assert end <= cut or data.startswith(data[:cut] + garbage)
    assert [each.index for each in kept] == list(range(lengths.index(end)))


def test_a_flipped_bit_is_seen():
    data = pack(outcome(0))
    for place in range(len(data) - 1):
        assert unpack(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]) == ([], 0)


def test_the_output_is_in_the_inputs_order_if_asked_else_as_rows_finished(tmp_path: Path):
    order = [3, 0, 2, 1, 9, 8, 4, 5, 7, 6]
    for name, ordered in (("a", True), ("b", False)):
        (tmp_path / name).mkdir()
        finish(begin(tmp_path / name), order, ordered=ordered)
    assert ids(tmp_path / "a") == [f"c{index}" for index in range(10)]
    assert ids(tmp_path / "b") == [f"c{index}" for index in (3, 0, 2, 1, 4, 5, 7, 6, 9, 8)]


def test_a_row_that_comes_twice_counts_once(tmp_path: Path):
    ledger = begin(tmp_path)
    list(ledger.pending(ROWS, [0]))
    assert len(ledger.add([outcome(1), outcome(1), outcome(2)])) == 2
    assert ledger.add([outcome(2)]) == []
    ledger.release()
    done = [0]
    assert [row.index for row in begin(tmp_path).pending(ROWS, done)] == [0, *range(3, 10)]
    assert done == [2]


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({**JOB, "input": {"mark": "xyz"}}, "input, mark: 'abc' there, 'xyz' here"),
        ({**JOB, "parameters": {"temperature": 0.5}}, "parameters, temperature: 0.0 there, 0.5 here"),
        ({**JOB, "parameters": {"temperature": 0.0, "seed": 1}}, "parameters, seed: None there, 1 here"),
    ],
)
@pytest.mark.parametrize("ended", [False, True])
def test_another_input_or_other_parameters_are_refused_by_name_unless_it_restarts(
    tmp_path: Path, job: dict[str, object], message: str, ended: bool
):
    ledger = begin(tmp_path)
    if ended:
        finish(ledger, list(range(10)))
    else:
        list(ledger.pending(ROWS, [0]))
        ledger.add([outcome(0)])
        ledger.release()
    with pytest.raises(ConfigurationError) as raised:
        begin(tmp_path, job)
    assert message in str(raised.value)
    assert "--restart" in str(raised.value)
    again = begin(tmp_path, job, restart=True)
    done = [0]
    assert len(list(again.pending(ROWS, done))) == 10
    assert done == [0]
    again.release()


def test_a_job_that_has_ended_is_known_and_one_whose_output_is_gone_begins_anew(tmp_path: Path):
    finish(begin(tmp_path), list(range(10)))
    ended = begin(tmp_path)
    assert ended.complete == {"rows": 10, "failed": 0}
    ended.release()
    (tmp_path / "out.jsonl").unlink()
    fresh = begin(tmp_path)
    assert fresh.complete is None
    finish(fresh, list(range(10)))
    assert len(ids(tmp_path)) == 10


def test_a_file_that_no_job_wrote_is_not_overwritten(tmp_path: Path):
    (tmp_path / "out.jsonl").write_text("precious")
    with pytest.raises(ConfigurationError, match="is there already"):
        begin(tmp_path)
    assert (tmp_path / "out.jsonl").read_text() == "precious"
    finish(begin(tmp_path, restart=True), list(range(10)))
    assert len(ids(tmp_path)) == 10


def test_two_processes_cannot_be_at_the_same_job(tmp_path: Path):
    first = begin(tmp_path)
    with pytest.raises(ConfigurationError, match="another process is at this job"):
        begin(tmp_path)
    first.release()
    begin(tmp_path).release()


def test_the_output_may_be_a_table(tmp_path: Path):
    ledger = begin(tmp_path, name="out.parquet")
    list(ledger.pending(ROWS, [0]))
    ledger.add([outcome(index) for index in range(9)])
    ledger.add([refused(Row(9, b"{"), "no JSON")])
    assert ledger.finish(10, ordered=True) == {"rows": 10, "failed": 1}
    rows = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert [row["custom_id"] for row in rows] == [*(f"c{index}" for index in range(9)), "row-9"]
    assert [row["text"] for row in rows[:9]] == [f"text {index}" for index in range(9)]
    assert (rows[9]["error"], rows[9]["status_code"], rows[0]["error"]) == ("no JSON", None, None)
