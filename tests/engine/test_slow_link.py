"""Groups whose ranks are on different hosts, behind slow links."""

import json
import sys
from pathlib import Path

import pytest
from overlap.hosts import ray_nodes, unavailable
from support.hosts import network

from raysonar import Engine, SamplingParams
from raysonar.demo import TARGET

QUESTIONS = ["What is the capital of France?", "Describe the climate of Norway.", "Which languages are spoken in Peru?"]
REASON = unavailable()

SCRIPT = """
import json, sys
import ray
from raysonar import SamplingParams
from raysonar.config import EngineConfig, ParallelConfig
from raysonar.driver.engine import Engine

address, tensor, data, prompts = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4])
ray.init(address=address, log_to_driver=False)
parallel = ParallelConfig(tensor=tensor, data=data, placement="SPREAD", micro_batching="always")
config = EngineConfig(model=sys.argv[5], dtype="float32", threads=1, max_model_len=128, parallel=parallel)
with Engine(config) as engine:
    results = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    groups = ray.util.placement_group_table().values()
    nodes = {node for group in groups for node in group["bundles_to_node_id"].values()}
print("RESULT " + json.dumps({"ids": [result.token_ids for result in results], "nodes": len(nodes)}), flush=True)
"""


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.parametrize(("hosts", "tensor", "data"), [(2, 1, 2), (4, 2, 2)])
def test_ranks_behind_a_slow_link_give_the_text_of_one_rank(tmp_path: Path, hosts: int, tensor: int, data: int) -> None:
    with Engine.from_folder(TARGET, dtype="float32", threads=1, max_model_len=128, speculative_tokens=0) as engine:
        prompts = [engine.tokenizer.render_chat([{"role": "user", "content": text}]) for text in QUESTIONS]
        alone = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True))
    with network(hosts, "200mbit") as made, ray_nodes(made, tmp_path, cpus=1) as address:
        log = tmp_path / "driver.log"
        arguments = [address, str(tensor), str(data), json.dumps(prompts), str(TARGET)]
        driver = made.start(0, [sys.executable, "-c", SCRIPT, *arguments], log, RAY_AUTH_MODE="disabled")
        try:
            status = driver.wait(240)
        finally:
            driver.kill()
        output = log.read_text()
    assert status == 0, output
    result = json.loads(output.partition("RESULT ")[2])
    assert result["nodes"] == hosts
    assert result["ids"] == [each.token_ids for each in alone]
