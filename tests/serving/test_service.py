"""`raysonar serve` and `serve run` as commands: they come up, answer, and leave nothing behind."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import ray
import yaml
from faults.victims import assert_gone, descendants, pids_of
from service import free_port
from support.service import MODEL

from raysonar import demo
from raysonar.cli import main
from raysonar.config import parse_service_config
from raysonar.errors import ConfigurationError
from raysonar.serving.app import DEMO_NAME, build_app, model_name, with_demo_model
from raysonar.serving.local import _cause

ROOT = Path(__file__).parents[2]
COMMANDS = Path(sys.executable).parent
START_S = 180.0
STOP_S = 90.0


@contextmanager
def running(command: list[str], log: Path) -> Iterator[subprocess.Popen[str]]:
    """A command whose output goes to `log`; it is told to end when the block does."""
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONUNBUFFERED": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, text=True, env=environment)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.wait(STOP_S)


def poll(holds: Callable[[], bool], process: subprocess.Popen[str], log: Path) -> None:
    """Ask until `holds`, at most START_S and as long as the process lives."""
    deadline = time.monotonic() + START_S
    while not holds():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=10.0).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="looks at processes through /proc")
def test_raysonar_serve_answers_and_leaves_nothing_behind(folder: Path, tmp_path: Path):
    port, log = free_port(), tmp_path / "log"
    url = f"http://127.0.0.1:{port}"
    command = [str(COMMANDS / "raysonar"), "serve", str(folder), "--port", str(port), "--speculative-tokens", "2"]
    with running(command, log) as process:
        poll(lambda: "Ctrl-C stops it." in log.read_text(), process, log)
        assert log.read_text().startswith(f"Starting {MODEL} ...\n")
        assert f"Serving {MODEL} at {url}/v1 (this machine only" in log.read_text()
        assert f"In a browser: {url}/\n" in log.read_text()
        assert "<title>raysonar</title>" in httpx.get(f"{url}/").text
        assert is_ready(url)
        body = {"model": MODEL, "prompt": "The", "max_tokens": 8, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60.0)
        assert answer.json()["usage"]["completion_tokens"] == 8
        started = descendants(process.pid)
        assert len(started) > 3
        options = body | {"max_tokens": 400, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=options, timeout=60.0) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"  # a stream that runs is not cut off
        assert process.wait(STOP_S) == 0
    assert "Traceback" not in log.read_text()
    assert_gone(started, timeout_s=30)  # Ray's own processes end just after the command


@pytest.mark.parametrize("name", ["demo", "demo-2-ranks"])
def test_serve_run_deploys_the_demo(name: str, tmp_path: Path):
    port, log, config = free_port(), tmp_path / "log", tmp_path / "demo.yaml"
    url = f"http://127.0.0.1:{port}"
    values = yaml.safe_load((ROOT / "serve_configs" / f"{name}.yaml").read_text())
    assert values["http_options"] == {"host": "127.0.0.1", "port": 8000}
    values["http_options"]["port"] = port
    config.write_text(yaml.safe_dump(values))
    with running([str(COMMANDS / "serve"), "run", "--address", "local", str(config)], log) as process:
        poll(lambda: is_ready(url), process, log)
        messages = [{"role": "user", "content": "What is the capital of France?"}]
        body = {"model": DEMO_NAME, "messages": messages, "temperature": 0, "max_tokens": 32}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60.0).json()
        assert "Paris" in answer["choices"][0]["message"]["content"]
        assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
        started = descendants(process.pid)
        assert len(started & pids_of("RankActor")) == (2 if name == "demo-2-ranks" else 0)
        process.send_signal(signal.SIGINT)
        assert process.wait(STOP_S) == 0
    assert_gone(started, timeout_s=30)  # Ray's own processes end just after the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["/does/not/exist"], r"/does/not/exist is not a model folder: it has no config\.json"),
        (["--speculative-tokens", "9"], r"engine\.speculation\.tokens: Input should be less than or equal to 8"),
        (["--replicas", "0"], r"replicas\.max: Input should be greater than or equal to 1"),
        (["--replicas", "3", "--max-replicas", "2"], r"replicas: Value error, max: 2 is less than min, 3"),
        (["--dtype", "float13"], r"engine\.dtype: Input should be 'auto'"),
        (["--address", "127.0.0.1:1"], r"no Ray answers at 127\.0\.0\.1:1"),
        (["--address", "nonsense:x"], r"no Ray answers at nonsense:x"),
    ],
)
@pytest.mark.usefixtures("ray_cluster")
def test_serve_says_in_one_line_what_is_wrong(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["serve", *arguments]) == 2
    assert re.fullmatch(rf"raysonar: {message}.*\n", capsys.readouterr().err)
    assert ray.is_initialized(), "a Ray that it has not started was ended"


def test_serve_says_when_its_port_is_taken(folder: Path, capsys: pytest.CaptureFixture[str]):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(folder), "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err


def test_a_wrong_field_fails_the_build_by_name():
    with pytest.raises(ConfigurationError, match=r"engine\.scheduling\.max_runing: Extra inputs"):
        build_app({"engine": {"scheduling": {"max_runing": 3}}})


def test_without_a_model_the_demo_is_served():
    config = parse_service_config(with_demo_model({"engine": {"dtype": "float32"}}))
    assert (config.engine.model, model_name(config), config.engine.dtype) == (demo.TARGET, DEMO_NAME, "float32")
    assert model_name(parse_service_config(with_demo_model({"engine": {"model": "/models/mine"}}))) == "mine"
    assert model_name(parse_service_config(with_demo_model({"model_name": "x"}))) == "x"


def test_the_cause_of_a_failed_start_is_found_in_serves_message():
    message = """The deployment failed to start 2 times in a row. Error:
ray::ServeReplica:raysonar:Driver.initialize_and_get_metadata() (pid=1, ip=192.0.2.1)
  File "driver.py", line 39, in __init__
raysonar.errors.ModelFolderError: m/model.safetensors: truncated: expected 5 bytes, found 3
"""
    assert _cause([message]) == "m/model.safetensors: truncated: expected 5 bytes, found 3"
    assert "out of memory" in _cause(["Traceback\nRuntimeError: out of memory"])
