"""A batch by a service that runs: over HTTP, and by the application's handle."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.service import APPLICATION, MODEL, Service

from raysonar import Engine, SamplingParams
from raysonar.cli import main

PROMPTS = [f"prompt {index}" for index in range(30)]


@pytest.mark.parametrize("way", ["endpoint", "serve-app"])
def test_a_batch_by_a_running_service_answers_as_the_engine_does(
    service: Service, engine: Engine, tmp_path: Path, way: str
):
    (tmp_path / "in.txt").write_text("\n".join(PROMPTS))
    by = [f"--{way}", f"{service.url}/v1" if way == "endpoint" else APPLICATION]
    files = ["--input", str(tmp_path / "in.txt"), "--output", str(tmp_path / "out.jsonl"), "--ordered"]
    assert main(["batch", *files, *by, "--raw", "--max-tokens", "9", "--concurrency", "6"]) == 0
    rows: list[dict[str, Any]] = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    expected = engine.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=9))
    assert [row["response"]["body"]["choices"][0]["text"] for row in rows] == [result.text for result in expected]
    assert {row["response"]["body"]["model"] for row in rows} == {MODEL}
    service.wait_until_idle()
