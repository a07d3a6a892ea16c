"""`ray job submit -- raysonar batch`, killed and submitted again; and the same command, interrupted."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray.job_submission import JobStatus
from support.checkpoints import make_deepseek_v3
from support.ray_head import head, submit, wait_for

RAYSONAR = Path(sys.executable).with_name("raysonar")
ROWS = 200
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_deepseek_v3(tmp_path_factory.mktemp("job") / "tiny", mtp=1)


def command(folder: Path, work: Path, *more: str) -> list[str]:
    """A batch of ROWS rows that take their time."""
    (work / "in.txt").write_text("\n".join(f"prompt {index}" for index in range(ROWS)))
    files = ["--input", str(work / "in.txt"), "--output", str(work / "out.jsonl"), "--ordered"]
    engine = ["--model", str(folder), "--max-running", "4", "--threads", "1", "--raw", "--max-tokens", "24"]
    return [str(RAYSONAR), "batch", *files, *engine, "--ignore-eos", *more]


def done(work: Path) -> int:
    """Rows that are done for good."""
    return sum(part.read_bytes().count(b"\n") for part in (work / "out.jsonl.ledger").glob("part-*"))


def wait_until_some_are_done(work: Path) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not done(work):
        assert time.monotonic() < deadline, "no row was done"
        time.sleep(0.01)
    assert done(work) < ROWS


def check(work: Path) -> None:
    rows = [json.loads(line) for line in (work / "out.jsonl").read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == [f"row-{index}" for index in range(ROWS)]
    assert {row["error"] for row in rows} == {None}


def processes_of(work: Path) -> list[int]:
    """The batch commands at work on this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"batch" in words and any(str(work).encode() in word for word in words):
                found.append(int(entry.name))
    return found


@pytest.mark.timeout(600)
def test_a_submitted_job_that_is_killed_and_submitted_again_answers_every_row_once(folder: Path, tmp_path: Path):
    entrypoint = shlex.join(command(folder, tmp_path, "--replicas", "2"))
    with head(cpus=4) as client:
        first = submit(client, entrypoint)
        wait_until_some_are_done(tmp_path)
        victims = processes_of(tmp_path)
        assert victims
        for victim in victims:
            os.kill(victim, signal.SIGKILL)
        assert wait_for(client, first) == JobStatus.FAILED
        before = done(tmp_path)
        assert 0 < before < ROWS
        second = submit(client, entrypoint)
        assert wait_for(client, second) == JobStatus.SUCCEEDED, client.get_job_logs(second)
        logs = client.get_job_logs(second)
        assert f"and {before} before" in logs
        assert f"out.jsonl: {ROWS} rows]" in logs
    check(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_command_says_that_it_goes_on_and_does(folder: Path, tmp_path: Path, number: signal.Signals):
    words = command(folder, tmp_path)
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        wait_until_some_are_done(tmp_path)
        process.send_signal(number)
        said = process.stderr.read()
        assert process.wait(DEADLINE_S) == 128 + signal.SIGINT
    assert "the same command goes on" in said
    assert "Traceback" not in said
    before = done(tmp_path)
    assert 0 < before < ROWS
    again = subprocess.run(words, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    assert f"and {before} before" in again.stderr
    check(tmp_path)
