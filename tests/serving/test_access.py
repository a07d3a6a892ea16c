"""API keys, limits and deadlines, over real HTTP: a service with all of them beside the one without."""

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from ray.exceptions import TaskCancelledError
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive
from support.service import MODEL, Deploy, Service

from raysonar.cli import main
from raysonar.config import parse_service_config
from raysonar.errors import ConfigurationError
from raysonar.serving import access
from raysonar.serving.access import ApiKeys
from raysonar.serving.app import build_app
from raysonar.serving.problems import ProblemError, problem_of

COMPLETIONS = "/v1/completions"
KEY, OTHER, LATER = "sk-first-key", "sk-second-key", "sk-third-key"
MAX_BODY, MAX_PROMPT, MAX_ANSWER, AT_ONCE = 1 << 20, 100, 200, 2
BODY = {"model": MODEL, "prompt": "The", "max_tokens": 3, "ignore_eos": True}
LONG = {**BODY, "max_tokens": MAX_ANSWER}
PAGE = "https://page.example"


@pytest.fixture(scope="module")
def keys_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(f"# ours\n\n{KEY}\n  {OTHER}  \n")
    return file


@pytest.fixture(scope="module")
def limited(deploy: Deploy, folder: Path, keys_file: Path) -> Service:
    """A service with keys and limits; it takes a dozen slots."""
    args: dict[str, Any] = {
        "engine": {"model": str(folder)},
        "api_keys_file": str(keys_file),
        "allowed_origins": [PAGE],
        "limits": {
            "max_body_bytes": MAX_BODY,
            "max_prompt_tokens": MAX_PROMPT,
            "max_answer_tokens": MAX_ANSWER,
            "max_requests_per_key": AT_ONCE,
            "timeout_s": 30.0,
        },
    }
    return deploy("guarded", build_app(args))


@pytest.fixture
def guarded(limited: Service) -> str:
    """The limited service's URL."""
    return limited.url


@pytest.fixture
def http(guarded: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded, timeout=60.0, headers={"Authorization": f"Bearer {KEY}"}) as client:
        yield client


def error(response: httpx.Response) -> dict[str, Any]:
    """OpenAI's error object."""
    assert response.json().keys() == {"error"}
    found = response.json()["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    return found


def test_requests_with_a_key_of_the_file_are_answered(http: httpx.Client):
    for key in (KEY, OTHER):
        response = http.post(COMPLETIONS, json=BODY, headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == 200
    assert http.get("/v1/models").status_code == 200


@pytest.mark.parametrize(
    "header", [None, "", "Bearer", f"Basic {KEY}", "Bearer sk-wrong", f"Bearer {KEY}x", "Bearer # ours", KEY]
)
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", COMPLETIONS),
        ("POST", "/v1/chat/completions"),
        ("GET", "/v1/models"),
        ("GET", "/v1/steps"),
        ("POST", "/v1/steps/trace"),
        ("GET", "/x"),
    ],
)
def test_requests_without_one_are_401(guarded: str, header: str | None, method: str, path: str):
    headers = {} if header is None else {"Authorization": header}
    response = httpx.request(method, guarded + path, json=BODY, headers=headers)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    assert error(response)["code"] == "invalid_api_key"
    assert KEY not in response.text
    assert "sk-wrong" not in response.text


def test_probes_and_metrics_need_no_key(guarded: str):
    for path in ("/health", "/ready", "/metrics"):
        assert httpx.get(guarded + path, timeout=30).status_code == 200
    assert 'raysonar_http_requests_total{model_name="tiny"' in httpx.get(f"{guarded}/metrics", timeout=30).text


def test_openais_client_sees_its_own_errors(guarded: str):
    with openai.OpenAI(base_url=f"{guarded}/v1", api_key=KEY, max_retries=0) as client:
        assert client.completions.create(model=MODEL, prompt="The", max_tokens=2).usage.completion_tokens <= 2
    with openai.OpenAI(base_url=f"{guarded}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError) as caught:
            client.completions.create(model=MODEL, prompt="The")
        assert caught.value.code == "invalid_api_key"


def _replace(file: Path, text: str) -> None:
    """As a secret mount does: another file under the same name."""
    fresh = file.with_suffix(".new")
    fresh.write_text(text)
    os.replace(fresh, file)


def _wait_for(client: httpx.Client, key: str, status: int) -> None:
    deadline = time.monotonic() + 20
    headers = {"Authorization": f"Bearer {key}"}
    while (found := client.get("/v1/models", headers=headers).status_code) != status:
        assert time.monotonic() < deadline, found


def test_keys_change_without_a_restart(http: httpx.Client, keys_file: Path):
    _wait_for(http, LATER, 401)
    _replace(keys_file, f"{KEY}\n{LATER}\n")
    _wait_for(http, LATER, 200)
    _wait_for(http, OTHER, 401)
    _wait_for(http, KEY, 200)
    keys_file.unlink()
    time_to_look = time.monotonic() + 1.5
    while time.monotonic() < time_to_look:  # keys that were read stay good while the file is away
        _wait_for(http, LATER, 200)
        _wait_for(http, OTHER, 401)
    _replace(keys_file, f"{KEY}\n{OTHER}\n")
    _wait_for(http, OTHER, 200)


def test_a_body_that_is_too_large_is_413(http: httpx.Client):
    pieces = (b" " * 65536 for _ in range(MAX_BODY // 65536 + 1))
    for content in (b" " * (MAX_BODY + 1), pieces):
        response = http.post(COMPLETIONS, content=content)
        assert response.status_code == 413
        assert str(MAX_BODY) in error(response)["message"]
    padded = json.dumps(BODY).encode().ljust(MAX_BODY)
    assert http.post(COMPLETIONS, content=padded).status_code == 200


def test_a_large_body_without_a_key_is_401(guarded: str):
    response = httpx.post(guarded + COMPLETIONS, content=b" " * (8 << 20), timeout=30)
    assert response.status_code == 401


def test_a_body_that_does_not_come_is_408(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(access, "BODY_PAUSE_S", 0.05)

    async def nothing() -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async def read(receive: Receive) -> None:
        async with asyncio.timeout(10):
            await access._Limited(receive, 100)()

    with pytest.raises(ProblemError) as caught:
        asyncio.run(read(nothing))
    assert caught.value.problem.status == 408


@pytest.mark.parametrize("end", [{"type": "http.disconnect"}, TaskCancelledError()], ids=["told", "cancelled"])
def test_a_client_that_leaves_within_its_body_is_no_fault_of_the_servers(end: Message | Exception):
    """Serve tells of it in either way."""

    async def leaves() -> Message:
        if isinstance(end, Exception):
            raise end
        return end

    async def read() -> None:
        await Request({"type": "http", "method": "POST", "headers": []}, access._Limited(leaves, 100)).body()

    with pytest.raises(ClientDisconnect) as left:
        asyncio.run(read())
    problem = problem_of(left.value)
    assert (problem.status, problem.code) == (400, "client_disconnected")


def test_a_disconnect_is_waited_for_as_long_as_it_takes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(access, "BODY_PAUSE_S", 0.0)

    async def later() -> Message:
        if not sent:
            sent.append(True)
            return {"type": "http.request", "body": b"x", "more_body": False}
        await asyncio.sleep(0.05)
        return {"type": "http.disconnect"}

    async def read() -> list[str]:
        limited = access._Limited(later, 100)
        return [(await limited())["type"] for _ in range(2)]

    sent: list[bool] = []
    assert asyncio.run(read()) == ["http.request", "http.disconnect"]


@pytest.mark.parametrize("prompt", ["word " * MAX_PROMPT, [5] * (MAX_PROMPT + 1), "word " * 200_000])
def test_prompts_longer_than_the_service_takes_are_400(http: httpx.Client, prompt: str | list[int]):
    response = http.post(COMPLETIONS, json={**BODY, "prompt": prompt})
    assert response.status_code == 400
    assert error(response)["param"] == "prompt"
    assert str(MAX_PROMPT) in error(response)["message"]


def test_answers_are_no_longer_than_the_service_gives(http: httpx.Client):
    response = http.post(COMPLETIONS, json={**BODY, "max_tokens": MAX_ANSWER + 1})
    assert (response.status_code, error(response)["param"]) == (400, "max_tokens")
    chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    answer = http.post("/v1/chat/completions", json=chat).json()
    assert answer["usage"]["completion_tokens"] == MAX_ANSWER
    assert answer["choices"][0]["finish_reason"] == "length"


async def _at_once(url: str) -> tuple[httpx.Response, int, list[int], int]:
    """One request more than a key may have; one of another key meanwhile; the held ones; and one afterwards."""
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, timeout=60.0, headers=headers) as client:
        done, held = asyncio.Event(), asyncio.Semaphore(0)

        async def hold() -> int:
            async with client.stream("POST", COMPLETIONS, json={**LONG, "stream": True}) as response:
                held.release()
                await done.wait()
                return response.status_code

        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            tasks = [group.create_task(hold()) for _ in range(AT_ONCE)]
            for _ in tasks:
                await held.acquire()
            more = await client.post(COMPLETIONS, json=BODY)
            other = await client.post(COMPLETIONS, json=BODY, headers={"Authorization": f"Bearer {OTHER}"})
            done.set()
        deadline = time.monotonic() + 20
        while (after := (await client.post(COMPLETIONS, json=BODY)).status_code) != 200:
            assert time.monotonic() < deadline, after
        return more, other.status_code, [task.result() for task in tasks], after


def test_more_requests_than_a_key_may_have_at_once_are_429(guarded: str):
    more, other, held, after = asyncio.run(_at_once(guarded))
    assert held == [200] * AT_ONCE
    assert (more.status_code, more.headers["retry-after"]) == (429, "1")
    assert error(more)["code"] == "rate_limit_exceeded"
    assert (other, after) == (200, 200)


def test_a_request_that_outlives_its_deadline_is_504(http: httpx.Client):
    response = http.post(COMPLETIONS, json={**LONG, "timeout": 0.05})
    assert response.status_code == 504
    assert error(response)["code"] == "deadline_exceeded"
    assert "0.05 s" in error(response)["message"]


def test_a_stream_that_outlives_its_deadline_ends_with_an_error(http: httpx.Client):
    began = time.monotonic()
    with http.stream("POST", COMPLETIONS, json={**LONG, "n": 64, "stream": True, "timeout": 0.5}) as response:
        lines = [line for line in response.iter_lines() if line]
    assert time.monotonic() - began < 10
    assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "deadline_exceeded"


def test_what_a_deadline_stops_frees_its_slots_and_pages(limited: Service, http: httpx.Client):
    before = limited.wait_until_idle()
    response = http.post(COMPLETIONS, json={**LONG, "n": 4, "timeout": 0.1})
    assert response.status_code == 504
    assert error(response)["code"] == "deadline_exceeded"
    assert limited.wait_until_idle().aborted == before.aborted + 1


@pytest.mark.parametrize("value", [0, -1, "5", True])
def test_a_deadline_is_a_positive_number_of_seconds(http: httpx.Client, value: object):
    response = http.post(COMPLETIONS, json={**BODY, "timeout": value})
    assert (response.status_code, error(response)["param"]) == (400, "timeout")


def test_pages_of_other_origins_may_ask_only_where_that_is_configured(guarded: str, service: Service):
    ask = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    for url, origin, allowed in (
        (guarded, PAGE, True),
        (guarded, "https://b.example", False),
        (service.url, PAGE, False),
    ):
        response = httpx.options(f"{url}{COMPLETIONS}", headers={"Origin": origin, **ask})
        assert (response.headers.get("access-control-allow-origin") == origin) == allowed
        assert "access-control-allow-credentials" not in response.headers
    refused = httpx.post(f"{guarded}{COMPLETIONS}", json=BODY, headers={"Origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)


def test_keys_that_cannot_be_read_fail_the_start(tmp_path: Path):
    file = tmp_path / "keys"
    with pytest.raises(ConfigurationError, match="api_keys_file"):
        ApiKeys(file)
    file.write_text("# none\n\n")
    with pytest.raises(ConfigurationError, match="no key"):
        ApiKeys(file)


def test_the_command_line_refuses_keys_that_cannot_be_read_before_ray_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert main(["serve", "--api-keys", str(tmp_path / "keys")]) == 2
    assert "api_keys_file" in capsys.readouterr().err


def test_a_limit_by_key_needs_keys():
    with pytest.raises(ConfigurationError, match="api_keys_file"):
        parse_service_config({"engine": {"model": "m"}, "limits": {"max_requests_per_key": 2}})
