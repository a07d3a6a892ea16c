"""`raysonar bench serve` against the real service."""

import json

import pytest
from support.service import Service

from raysonar.cli import main


@pytest.mark.parametrize("route", ["chat", "completions"])
def test_every_request_is_answered_and_every_token_counted(
    service: Service, route: str, capsys: pytest.CaptureFixture[str]
):
    words = ["--requests", "12", "--warm-up", "1", "--concurrency", "4", "--random-words", "5-9", "--route", route]
    more = ["--max-tokens", "6", "--ignore-eos", "--slo", "e2e=60000"]
    assert main(["bench", "serve", "--endpoint", f"{service.url}/v1", *words, *more]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["requests"], result["failed"], result["completion_tokens"]) == (12, 0, 72)
    assert 0 <= result["acceptance"] <= 1
    assert result["goodput"]["share"] == 1.0
    assert 0 < result["latency_ms"]["ttft"]["p50"] < result["latency_ms"]["e2e"]["p50"]
    service.wait_until_idle()
