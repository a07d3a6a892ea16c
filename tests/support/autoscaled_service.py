"""A service that scales with its cluster, from one replica to two, to none and back; run inside `autoscaling.alone`.

    python -m support.autoscaled_service FOLDER SOCKETS

Prints `RESULT` and what was seen, as JSON.
"""

import asyncio
import concurrent.futures
import functools
import json
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import ray
from ray import serve
from ray.serve.config import AutoscalingConfig, ProxyLocation
from support.autoscaling import cluster

from raysonar.serving import app

NAME = "raysonar"
URL = "http://127.0.0.1:8000"
PROMPTS = ["The capital of France", "The climate of Norway", "Languages of Peru"]
STREAMS = 6
"""At a time: more than one replica should have."""
DEADLINE_S = 240.0
WORKER = {
    "resources": {"CPU": 2, "object_store_memory": 80_000_000},
    "node_config": {},
    "min_workers": 0,
    "max_workers": 2,
}
ARGS = {
    "replicas": {"min": 0, "max": 2, "target_ongoing_requests": 2, "upscale_delay_s": 0, "downscale_delay_s": 1},
    "start_timeout_s": 200,
    "engine": {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 256,
        "scheduling": {"max_running": 8},
        "parallel": {"data": 2, "placement": "STRICT_PACK", "micro_batching": "never"},
    },
}


def replicas() -> int:
    """Of the driver, that run."""
    states = serve.status().applications[NAME].deployments["Driver"].replica_states
    return sum(count for state, count in states.items() if state == "RUNNING")


def seen() -> dict[str, Any]:
    """The cluster now: nodes with the head, replicas, and the nodes of each group of ranks that has its places."""
    groups = ray.util.placement_group_table().values()
    places = [group["bundles_to_node_id"] for group in groups if group["state"] == "CREATED"]
    return {
        "nodes": sum(node["Alive"] for node in ray.nodes()),
        "replicas": replicas(),
        "groups": [[len(nodes), len(set(nodes.values()))] for nodes in places],
    }


def wait_for(holds: Callable[[dict[str, Any]], bool], deadline_s: float = DEADLINE_S) -> dict[str, Any]:
    """What is seen, once it is as wanted, and the seconds until then."""
    began = time.monotonic()
    while not holds(now := seen()):
        assert time.monotonic() - began < deadline_s, f"still {now}: {serve.status()}"
        time.sleep(0.2)
    return now | {"seconds": round(time.monotonic() - began, 1)}


def served() -> list[int]:
    """Requests that each replica has had."""
    driver = serve.get_deployment_handle("Driver", NAME)
    return [stats.requests for stats in driver.broadcast("stats").results(timeout_s=30)]


class Load:
    """Streams, always STREAMS of them at once, until it is told to stop; those that run then end as they would."""

    def __init__(self) -> None:
        self.texts: dict[str, set[str]] = {prompt: set() for prompt in PROMPTS}
        self.streams = 0
        self._wanted = True

    async def run(self) -> None:
        async with httpx.AsyncClient(base_url=URL, timeout=DEADLINE_S) as client:
            await asyncio.gather(*(self._streams(client, place) for place in range(STREAMS)))

    async def _streams(self, client: httpx.AsyncClient, place: int) -> None:
        prompt = PROMPTS[place % len(PROMPTS)]
        body = {"model": app.DEMO_NAME, "prompt": prompt, "max_tokens": 120, "ignore_eos": True, "temperature": 0}
        while self._wanted:
            async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
                lines = [line async for line in response.aiter_lines() if line]
            assert lines.pop() == "data: [DONE]", lines
            chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
            self.texts[prompt].add("".join(chunk["choices"][0]["text"] for chunk in chunks if chunk["choices"]))
            self.streams += 1

    @contextmanager
    def running(self) -> Any:
        """In another thread; raises what a stream has raised."""
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            future = pool.submit(asyncio.run, self.run())
            try:
                yield
            finally:
                self._wanted = False
            future.result(DEADLINE_S)


def ask() -> str:
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": app.DEMO_NAME, "messages": question, "temperature": 0}
    answer = httpx.post(f"{URL}/v1/chat/completions", json=body, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def watch() -> dict[str, Any]:
    """One stage after the other."""
    stages: dict[str, Any] = {"before": {"nodes": len(ray.nodes())}}
    began = time.monotonic()
    serve.run(app.build_app(ARGS), name=NAME)
    stages["started"] = seen() | {"seconds": round(time.monotonic() - began, 1)}
    load = Load()
    with load.running():
        stages["loaded"] = wait_for(lambda now: now["replicas"] == 2)
        deadline = time.monotonic() + DEADLINE_S
        while len(counts := served()) < 2 or not all(count > 1 for count in counts):
            assert time.monotonic() < deadline, counts
            time.sleep(0.2)
    stages["load"] = {"streams": load.streams, "texts": {prompt: len(texts) for prompt, texts in load.texts.items()}}
    stages["quiet"] = wait_for(lambda now: now["replicas"] == 0 and now["nodes"] == 1)
    stages["asleep"] = [httpx.get(f"{URL}{path}", timeout=30).json() for path in ("/health", "/ready")]
    stages["scraped"] = httpx.get(f"{URL}/metrics", timeout=30).status_code
    stages["still asleep"] = seen()
    began = time.monotonic()
    stages["answer"] = ask()
    stages["woken"] = seen() | {"seconds": round(time.monotonic() - began, 1)}
    return stages


def main(folder: Path, sockets: Path) -> None:
    # Serve is told how many requests there are each 10 s, and looks back 15 s: less waiting, the same decisions
    app.AutoscalingConfig = functools.partial(AutoscalingConfig, metrics_interval_s=1.0)  # type: ignore
    app._LOOK_BACK_S = (2.0, 2.0)
    with cluster(folder, sockets, {"worker": WORKER}) as address:
        ray.init(address=address, log_to_driver=False)
        serve.start(proxy_location=ProxyLocation.HeadOnly, http_options={"host": "127.0.0.1", "port": 8000})
        print("RESULT " + json.dumps(watch()), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
