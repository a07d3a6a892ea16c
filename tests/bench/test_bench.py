"""The commands, against an endpoint whose answers are known and with the demo model."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from support.flaky_endpoint import echo, endpoint, events

from raysonar.cli import main


def usage(tokens: int) -> dict[str, Any]:
    details = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1}
    return {"prompt_tokens": 5, "completion_tokens": tokens, "completion_tokens_details": details}


def chunk(text: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {"content": text}}]}


def serve(url: str, *more: str) -> int:
    return main(["bench", "serve", "--endpoint", url, *more])


def test_streams_are_watched_and_counted_by_the_servers_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    at_once, most, bodies = 0, 0, list[dict[str, Any]]()

    async def handler(body: dict[str, Any]) -> web.StreamResponse:
        nonlocal at_once, most
        bodies.append(body)
        at_once += 1
        most = max(most, at_once)
        at_once -= 1
        role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
        return events(role, chunk("a"), chunk("b"), chunk("c"), {"choices": [], "usage": usage(9)}, "[DONE]")

    output, plot = tmp_path / "out.json", tmp_path / "out.png"
    files = ["--output", str(output), "--plot", str(plot)]
    with endpoint(handler) as url:
        assert serve(url, "--requests", "20", "--concurrency", "4", "--warm-up", "3", "--slo", "e2e=60000", *files) == 0
    result = json.loads(output.read_text())
    assert len(bodies) == 23
    assert {(body["path"], body["stream"], body["max_tokens"]) for body in bodies} == {
        ("/v1/chat/completions", True, 64)
    }
    assert (result["requests"], result["failed"], result["completion_tokens"]) == (20, 0, 180)
    assert (result["prompt_tokens"], result["acceptance"]) == (100, 0.75)
    assert result["goodput"]["share"] == 1.0
    assert [len(record["gaps"]) for record in result["records"]] == [2] * 20
    assert all(0 < record["first"] <= record["seconds"] for record in result["records"])
    assert result["settings"]["concurrency"] == 4
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "20 requests in " in (shown := capsys.readouterr().err)
    assert "75.0% of drafts accepted" in shown


def test_whole_answers_of_completions_at_a_rate_have_only_their_whole_time(capsys: pytest.CaptureFixture[str]):
    async def handler(body: dict[str, Any]) -> web.StreamResponse:
        assert (body["path"], "stream" in body, body["ignore_eos"]) == ("/v1/completions", False, True)
        assert 8 <= len(body["prompt"].split()) <= 9
        return echo(body)

    how = ["--rate", "500", "--arrivals", "constant", "--no-stream", "--route", "completions"]
    with endpoint(handler) as url:
        assert serve(url, "--requests", "50", *how, "--random-words", "8-9", "--ignore-eos") == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["requests"], result["failed"], result["completion_tokens"]) == (50, 0, 100)
    assert result["seconds"] >= 49 / 500
    assert result["latency_ms"]["ttft"] is None
    assert result["latency_ms"]["e2e"]["p99"] > 0


def test_what_goes_wrong_is_counted_by_its_reason(capsys: pytest.CaptureFixture[str]):
    seen: Counter[str] = Counter()

    async def handler(body: dict[str, Any]) -> web.StreamResponse:
        seen["all"] += 1
        match seen["all"] % 5:
            case 0:
                return web.Response(status=503)
            case 1:
                return events(chunk("a"))
            case 2:
                return events(chunk("a"), {"error": {"message": "broken"}})
            case 3:
                return events("{")
        return events(chunk("a"), "[DONE]")

    with endpoint(handler) as url:
        assert serve(url, "--requests", "25", "--concurrency", "1", "--warm-up", "0") == 0
        result = json.loads(capsys.readouterr().out)
        assert (result["requests"], result["failed"], result["completion_tokens"]) == (25, 20, 5)
        errors = result["errors"]
        assert sorted(errors.values()) == [5, 5, 5, 5]
        for words in ("HTTP status 503", "without [DONE]", "broken", "JSONDecodeError"):
            assert any(words in error for error in errors)
        assert serve(url, "--requests", "1", "--warm-up", "4") == 2
    assert "every request failed: HTTP status 503" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arrivals", "constant"], "--arrivals is for a --rate"),
        (["--slo", "x=1"], "an objective is ttft=MS"),
        (["--dataset", "/does/not/exist"], "/does/not/exist is not read"),
        ([], "no server answers at http://127.0.0.1:9"),
    ],
)
def test_what_cannot_work_is_said_in_one_line(words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert serve("http://127.0.0.1:9/v1", *words) == 2
    assert message in capsys.readouterr().err


def test_an_engine_is_measured_in_this_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    dataset, plot = tmp_path / "prompts.jsonl", tmp_path / "plot.png"
    dataset.write_text(
        "\n".join(json.dumps({"prompt": f"What is the capital of {name}?"}) for name in ("Chad", "Peru"))
    )
    words = ["--dataset", str(dataset), "--requests", "12", "--max-tokens", "3-6", "--ignore-eos", "--threads", "1"]
    assert main(["bench", "offline", *words, "--plot", str(plot)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["requests"], result["failed"]) == (12, 0)
    assert 36 <= result["completion_tokens"] <= 72
    assert 0 < result["acceptance"] <= 1
    assert result["latency_ms"]["ttft"]["p50"] <= result["latency_ms"]["e2e"]["p50"]
    assert plot.read_bytes().startswith(b"\x89PNG")
