"""A batch by engines of its own: what it answers, and that it goes on."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import make_deepseek_v3

from raysonar import Engine, SamplingParams
from raysonar.cli import main

QUESTIONS = [f"What is the capital of {name}?" for name in "Norway Chad Peru Kenya Spain Japan Egypt Chile".split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_deepseek_v3(tmp_path_factory.mktemp("batch") / "tiny", mtp=1)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    with Engine.from_folder(folder, threads=1) as engine:
        yield engine


def batch(folder: Path, work: Path, *more: str) -> int:
    files = ["--input", str(work / "in.jsonl"), "--output", str(work / "out.jsonl"), "--ordered"]
    return main(["batch", *files, "--model", str(folder), "--threads", "1", "--max-running", "4", *more])


def write(work: Path, rows: list[Any]) -> None:
    (work / "in.jsonl").write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))


def read(work: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (work / "out.jsonl").read_text().splitlines()]


def greedy(engine: Engine, question: str, **more: Any) -> str:
    params = SamplingParams(temperature=0, max_tokens=12, **more)
    return engine.generate(engine.tokenizer.render_chat([{"role": "user", "content": question}]), params)[0].text


def content(row: dict[str, Any]) -> str:
    return row["response"]["body"]["choices"][0]["message"]["content"]


def test_every_kind_of_row_is_answered_as_the_engine_answers_it_and_bad_rows_say_why(
    folder: Path, engine: Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    messages = [{"role": "user", "content": QUESTIONS[0]}]
    chat = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 12}
    write(
        tmp_path,
        [
            {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": chat},
            {"prompt": QUESTIONS[1]},
            {
                "custom_id": "c",
                "method": "POST",
                "url": "/v1/completions",
                "body": {"prompt": ["x", "y"], "logprobs": 1, "ignore_eos": True},
            },
            {"custom_id": "d", "method": "POST", "url": "/v1/chat/completions", "body": {**chat, "model": "gpt"}},
            {"prompt": QUESTIONS[0], "stream": True},
            {"prompt": QUESTIONS[0], "nonsense": 1},
            "{",
        ],
    )
    assert batch(folder, tmp_path, "--max-tokens", "12") == 0
    rows = read(tmp_path)
    assert [row["custom_id"] for row in rows] == ["a", "row-1", "c", "d", "row-4", "row-5", "row-6"]
    assert [content(row) for row in rows[:2]] == [greedy(engine, question) for question in QUESTIONS[:2]]
    assert rows[0]["response"]["body"]["usage"]["completion_tokens"] == 12
    both = rows[2]["response"]["body"]["choices"]
    assert [choice["index"] for choice in both] == [0, 1]
    assert all(len(choice["logprobs"]["tokens"]) == 12 for choice in both)
    assert [row["response"] and row["response"]["status_code"] for row in rows] == [200, 200, 200, 404, 400, 400, None]
    reasons = [row["error"] and row["error"]["message"] for row in rows]
    assert reasons[:3] == [None] * 3
    for reason, words in zip(reasons[3:], ("'gpt' does not exist", "streamed", "nonsense", "not JSON"), strict=True):
        assert words in reason
    assert "7 rows, 4 of them errors]" in capsys.readouterr().err


def test_a_batch_that_has_ended_or_whose_rows_are_done_loads_no_model(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write(tmp_path, [{"prompt": question} for question in QUESTIONS])
    assert batch(folder, tmp_path, "--max-tokens", "3") == 0
    first = (tmp_path / "out.jsonl").read_bytes()

    def no_driver(*_: Any) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("raysonar.batch.replicas.Driver", no_driver)
    assert batch(folder, tmp_path, "--max-tokens", "3") == 0
    assert (tmp_path / "out.jsonl").read_bytes() == first
    assert batch(folder, tmp_path, "--max-tokens", "4") == 2


@pytest.mark.usefixtures("ray_cluster")
def test_replicas_in_actors_share_the_rows_and_one_that_is_lost_is_started_again(
    folder: Path, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    import ray

    from raysonar.batch.replicas import ActorReplica

    lost = []
    exchange = ActorReplica.exchange

    async def losing(self: ActorReplica, rows: list[Any]) -> Any:
        if not lost:
            lost.append(len(rows))
            ray.kill(self._actor)
        return await exchange(self, rows)

    monkeypatch.setattr(ActorReplica, "exchange", losing)
    write(tmp_path, [{"prompt": question} for question in QUESTIONS * 3])
    assert batch(folder, tmp_path, "--max-tokens", "12", "--replicas", "2") == 0
    assert lost
    assert lost[0] > 0
    expected = [greedy(engine, question) for question in QUESTIONS]
    assert [content(row) for row in read(tmp_path)] == expected * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--input", "/does/not/exist.jsonl"], "/does/not/exist.jsonl is not there"),
        (["--input", "x.bin"], "x.bin is not there"),
        (["--output", "nosuch://x/y"], "cannot reach nosuch://x/y"),
        (["--endpoint", "http://127.0.0.1:9"], "--model is for engines of the job's own"),
        (["--concurrency", "3"], "--concurrency is for --endpoint and --serve-app"),
        (["--temperature", "-1"], "temperature must be from 0.0 to 100.0"),
        (["--speculative-tokens", "9"], "engine.speculation.tokens"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_anything_is_written(
    folder: Path, tmp_path: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
):
    write(tmp_path, ["{}"])
    assert batch(folder, tmp_path, *options) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len(said) == 1
    assert message in said[0]
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]
