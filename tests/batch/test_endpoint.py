"""A batch by an endpoint that is busy, hangs up, or refuses; and one in an object store."""

import asyncio
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import fsspec
import pytest
from aiohttp import web
from support.flaky_endpoint import echo, endpoint

from raysonar.batch import answers
from raysonar.batch.answers import EndpointAnswers, Patience
from raysonar.batch.outcome import Outcome
from raysonar.batch.progress import Progress
from raysonar.batch.rows import Asking, Row
from raysonar.cli import main

PROMPTS = [f"prompt {index}" for index in range(40)]


def batch(folder: Path | str, url: str, *more: str) -> int:
    return main(["batch", "--input", f"{folder}/in.txt", "--output", f"{folder}/out.jsonl", "--endpoint", url, *more])


def texts(rows: list[dict[str, Any]]) -> list[str]:
    return [row["response"]["body"]["choices"][0]["message"]["content"] for row in rows]


def read(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_an_endpoint_that_is_busy_or_hangs_up_is_asked_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "in.txt").write_text("\n".join(PROMPTS))
    attempts: Counter[str] = Counter()
    at_once, most = 0, 0

    async def handler(body: dict[str, Any]) -> web.StreamResponse:
        nonlocal at_once, most
        text = body["messages"][0]["content"]
        attempts[text] += 1
        at_once += 1
        most = max(most, at_once)
        try:
            await asyncio.sleep(0)
            if text.endswith("1") and attempts[text] == 1:
                return web.Response(status=503, headers={"Retry-After": "0"})
            if text.endswith("2") and attempts[text] == 1:
                body["hang_up"]()
            return echo(body)
        finally:
            at_once -= 1

    with endpoint(handler) as url:
        assert batch(tmp_path, url, "--ordered", "--concurrency", "3") == 0
    rows = read(tmp_path / "out.jsonl")
    assert texts(rows) == PROMPTS
    assert {row["error"] for row in rows} == {None}
    assert most <= 3
    assert attempts["prompt 1"] == 2
    assert "[40 rows; " in (shown := capsys.readouterr().err)
    assert "75% of drafts accepted" in shown


def test_rows_that_the_endpoint_refuses_are_error_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "in.txt").write_text("\n".join(PROMPTS[:4]))
    (tmp_path / "key").write_text("# of June\n\nsecret\nanother\n")

    async def handler(body: dict[str, Any]) -> web.StreamResponse:
        assert body["headers"]["Authorization"] == "Bearer secret"
        assert (body["model"], body["temperature"], body["max_tokens"]) == ("echo", 0.0, 9)
        match body["messages"][0]["content"]:
            case "prompt 1":
                return web.json_response({"error": {"message": "no", "code": "bad"}}, status=400)
            case "prompt 2":
                return web.Response(text="oops", status=500)
        return echo(body)

    with endpoint(handler) as url:
        assert batch(tmp_path, url, "--ordered", "--max-tokens", "9", "--api-key-file", str(tmp_path / "key")) == 0
    rows = read(tmp_path / "out.jsonl")
    assert [row["response"]["status_code"] for row in rows] == [200, 400, 500, 200]
    assert rows[1]["error"] == {"code": "bad", "message": "no"}
    assert rows[2]["error"] == {"code": "500", "message": "the server answered 500 without a JSON object: oops"}
    assert "4 rows, 2 of them errors]" in capsys.readouterr().err


def test_a_service_that_is_being_replaced_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Serve's proxy has no route meanwhile, and says so in words; a model that is not there is the row's fault."""
    monkeypatch.setattr(answers, "_FIRST_PAUSE_S", 0.001)
    (tmp_path / "in.txt").write_text("\n".join(PROMPTS[:4]))
    asked = Counter[str]()

    async def handler(body: dict[str, Any]) -> web.StreamResponse:
        prompt = body["messages"][0]["content"]
        asked[prompt] += 1
        if prompt == "prompt 1":
            return web.json_response({"error": {"message": "no such model", "code": "model_not_found"}}, status=404)
        if asked[prompt] < 3:
            return web.Response(text="Path '/v1/chat/completions' not found.", status=404)
        return echo(body)

    with endpoint(handler) as url:
        assert batch(tmp_path, url, "--ordered") == 0
    rows = read(tmp_path / "out.jsonl")
    assert [row["response"]["status_code"] for row in rows] == [200, 404, 200, 200]
    assert asked["prompt 0"] == 3


def test_an_endpoint_that_lets_nobody_in_ends_the_job_and_loses_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "in.txt").write_text("\n".join(PROMPTS))
    answered, expired = list[str](), True

    async def handler(body: dict[str, Any]) -> web.StreamResponse:
        if expired and len(answered) == 10:
            return web.json_response({"error": {"message": "the key has expired"}}, status=401)
        answered.append(body["messages"][0]["content"])
        return echo(body)

    with endpoint(handler) as url:
        assert batch(tmp_path, url, "--ordered", "--concurrency", "1") == 2
        assert "answers 401: {'message': 'the key has expired'}" in capsys.readouterr().err
        assert not (tmp_path / "out.jsonl").exists()
        expired = False
        assert batch(tmp_path, url, "--ordered", "--concurrency", "1") == 0
    rows = read(tmp_path / "out.jsonl")
    assert texts(rows) == PROMPTS
    assert {row["error"] for row in rows} == {None}
    assert len(answered) - len(PROMPTS) <= 2, "more was repeated than was in flight"


def test_a_row_that_is_never_answered_while_others_are_is_an_error_row():
    async def handler(body: dict[str, Any]) -> web.StreamResponse:
        bad = body["messages"][0]["content"] == "bad"
        return web.Response(status=502, headers={"Retry-After": "0"}) if bad else echo(body)

    async def ask(url: str) -> Outcome:
        answers = EndpointAnswers(url, Asking(), concurrency=2)
        answers.patience = Patience(attempts=3)
        await answers.start(None)
        try:
            bad = asyncio.create_task(answers(Row(0, b'{"prompt": "bad"}')))
            while not bad.done():
                await answers(Row(1, b'{"prompt": "good"}'))
            return bad.result()
        finally:
            await answers.close()

    with endpoint(handler) as url:
        outcome = asyncio.run(ask(url))
    assert (outcome.status, outcome.failed) == (502, True)


def test_an_endpoint_that_answers_nothing_any_more_ends_the_job():
    async def handler(body: dict[str, Any]) -> web.StreamResponse:
        return web.Response(status=503)

    async def ask(url: str) -> Outcome:
        answers = EndpointAnswers(url, Asking(), concurrency=2)
        answers.patience = Patience(0.0)
        await answers.start(None)
        try:
            return await answers(Row(0, b'{"prompt": "x"}'))
        finally:
            await answers.close()

    with endpoint(handler) as url, pytest.raises(RuntimeError, match="nothing was answered for 0 s"):
        asyncio.run(ask(url))


def test_input_output_and_ledger_may_be_in_an_object_store(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "any")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    answered: list[str] = []

    async def handler(body: dict[str, Any]) -> web.StreamResponse:
        answered.append(body["messages"][0]["content"])
        return echo(body)

    try:
        store = fsspec.filesystem("s3")
        store.mkdir("bucket")
        store.pipe_file("bucket/in.txt", "\n".join(PROMPTS).encode())
        with endpoint(handler) as url:
            assert batch("s3://bucket", url, "--ordered", "--concurrency", "2") == 0
            assert batch("s3://bucket", url, "--ordered") == 0
            assert batch("s3://bucket", url, "--seed", "1") == 2
        store.invalidate_cache()
        rows = [json.loads(line) for line in store.cat_file("bucket/out.jsonl").splitlines()]
        assert texts(rows) == PROMPTS
        assert len(answered) == 40, "the second time there was nothing to do"
        assert store.ls("bucket/out.jsonl.ledger", detail=False) == ["bucket/out.jsonl.ledger/header.json"]
        assert "s3://bucket/out.jsonl belongs to another job (parameters, seed: None there, 1 here)" in (
            capsys.readouterr().err
        )
    finally:
        server.stop()


def test_the_progress_line_tells_rates_acceptance_and_the_time_that_is_left():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    now, read_so_far, screen = 0.0, 0.25, Terminal()
    progress = Progress(lambda: read_so_far, screen, lambda: now)
    progress.begin(earlier=5)
    now, read_so_far = 10.0, 0.5
    progress.add([Outcome(index, 200 if index else 400, b"", 30, 8, 6) for index in range(20)])
    assert screen.getvalue() == (
        "\r\x1b[K[20 rows (and 5 before); 1 failed; 2.0 rows/s, 60 tokens/s; 75% of drafts accepted; "
        "50% read, about 0:00:20 left]"
    )
    log = io.StringIO()
    progress = Progress(lambda: 0.0, log, lambda: now)
    progress.begin(0)
    now += 9.0
    progress.add([])
    assert log.getvalue() == ""
    now += 2.0
    progress.add([])
    assert log.getvalue() == "[0 rows; 0.0 rows/s, 0 tokens/s]\n"
