"""Replicas follow the load, and the cluster's nodes follow the replicas; Ray's autoscaler, on this machine."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.autoscaling import alone, unavailable

from raysonar.config import ServiceConfig, parse_service_config
from raysonar.errors import ConfigurationError
from raysonar.serving import app

REASON = unavailable()
ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.timeout(900)
def test_load_brings_nodes_quiet_takes_them_away_and_a_request_brings_one_back(tmp_path: Path):
    environment = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}
    path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
    # Ray's sockets want a shorter path than pytest's folders have
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as sockets:
        command = alone([sys.executable, "-m", "support.autoscaled_service", str(tmp_path), sockets])
        done = subprocess.run(
            command,
            env={**os.environ, **environment, "PYTHONPATH": path},
            capture_output=True,
            text=True,
            timeout=840,
            check=False,
        )
    # (its exit status is Ray's, whose cluster ends under it)
    assert "RESULT " in done.stdout, done.stdout[-4000:] + done.stderr[-8000:]
    stages: dict[str, Any] = json.loads(done.stdout.partition("RESULT ")[2])
    print(json.dumps(stages, indent=1))
    # a service that has no place waits for a node; each group of two ranks is whole, on a node of its own
    assert stages["before"]["nodes"] == 1
    assert state(stages["started"]) == (2, 1, [[2, 1]])
    assert state(stages["loaded"]) == (3, 2, [[2, 1], [2, 1]])
    # text does not depend on the replica
    assert stages["load"]["streams"] > 6
    assert set(stages["load"]["texts"].values()) == {1}
    # once the streams have ended everything goes; looking at it wakes nobody
    assert state(stages["quiet"]) == (1, 0, [])
    assert stages["asleep"] == [{"status": "asleep"}] * 2
    assert stages["scraped"] == 200
    assert state(stages["still asleep"]) == (1, 0, [])
    assert "Paris" in stages["answer"]
    assert state(stages["woken"]) == (2, 1, [[2, 1]])


def state(stage: dict[str, Any]) -> tuple[int, int, list[list[int]]]:
    return stage["nodes"], stage["replicas"], stage["groups"]


def config(replicas: object = None, **engine: object) -> ServiceConfig:
    args: dict[str, object] = {"engine": {"device": "cpu", **engine}}
    return parse_service_config(app.with_demo_model(args | ({} if replicas is None else {"replicas": replicas})))


def driver_of(application: Any) -> Any:
    """The driver's deployment."""
    return application._bound_deployment.init_args[0]._bound_deployment


def scaling(replicas: object, **engine: object) -> Any:
    """The driver's scaling as Serve has it: a number of replicas, or a range's fields."""
    driver = driver_of(app.application(config(replicas, **engine)))
    scaled = driver._deployment_config.autoscaling_config
    return driver.num_replicas if scaled is None else scaled


def test_without_more_ado_there_is_one_replica():
    assert scaling(None) == scaling(1) == scaling({"min": 1, "max": 1}) == 1
    assert scaling(3) == 3


def test_a_range_is_scaled_by_three_quarters_of_the_slots():
    scaled = scaling({"min": 2, "max": 5}, scheduling={"max_running": 32}, parallel={"data": 2})
    assert (scaled.min_replicas, scaled.initial_replicas, scaled.max_replicas) == (2, None, 5)
    assert scaled.target_ongoing_requests == 0.75 * 32 * 2
    assert (scaled.upscale_delay_s, scaled.downscale_delay_s, scaled.look_back_period_s) == (15, 600, 15)


def test_a_slot_alone_is_used_whole():
    assert scaling({"max": 2}, scheduling={"max_running": 1}).target_ongoing_requests == 1


def test_all_of_a_range_can_be_told():
    told = {"min": 1, "max": 2, "target_ongoing_requests": 7.5, "upscale_delay_s": 120, "downscale_delay_s": 3}
    scaled = scaling(told)
    assert (scaled.target_ongoing_requests, scaled.upscale_delay_s, scaled.downscale_delay_s) == (7.5, 120, 3)
    assert scaled.look_back_period_s == 30


def test_a_service_that_may_sleep_starts_awake_so_that_a_bad_model_is_refused():
    scaled = scaling({"min": 0, "max": 2})
    assert (scaled.min_replicas, scaled.initial_replicas) == (0, 1)


@pytest.mark.parametrize(
    ("replicas", "message"),
    [
        (0, r"replicas\.max: .*greater than or equal to 1 \(got 0\)"),
        ({"min": 3}, r"max: 1 is less than min, 3"),
        ({"min": -1, "max": 2}, r"replicas\.min: .*greater than or equal to 0"),
        (True, r"replicas: .*dictionary"),
        ({"max": 2, "target_ongoing_requests": 0}, r"replicas\.target_ongoing_requests"),
        ({"maximum": 2}, r"replicas\.maximum: Extra inputs"),
    ],
)
def test_what_cannot_be_is_refused_by_name(replicas: object, message: str):
    with pytest.raises(ConfigurationError, match=message):
        config(replicas)


def test_a_group_has_its_places_from_serve():
    group = places(parallel={"data": 2, "tensor": 2, "placement": "SPREAD"}, threads=3)
    assert group.placement_group_bundles == [{"CPU": 3.0}] * 4
    assert group.placement_group_strategy == "SPREAD"
    assert group.ray_actor_options["num_cpus"] == 0
    assert places(parallel={"data": 2}, device="cuda").placement_group_bundles == [{"CPU": 1.0, "GPU": 1.0}] * 2
    one = places()
    assert one.placement_group_bundles is None
    assert one.ray_actor_options["num_cpus"] == 1


def places(**engine: object) -> Any:
    """What Serve reserves for each replica of the driver."""
    return driver_of(app.application(config(**engine)))._replica_config


def router_of(replicas: object, **engine: object) -> tuple[str, Mapping[str, object]]:
    router = driver_of(app.application(config(replicas, **engine)))._deployment_config.request_router_config
    return router.request_router_class.rpartition(".")[2], router.request_router_kwargs


def test_prompts_are_routed_by_their_beginnings_where_that_can_help():
    slots = {"scheduling": {"max_running": 40}}
    assert router_of({"min": 1, "max": 2}, **slots) == ("PrefixRouter", {"spread": 10})
    assert router_of(2, scheduling={"max_running": 2}) == ("PrefixRouter", {"spread": 1})
    assert "PrefixRouter" not in router_of(1)[0]
    assert "PrefixRouter" not in router_of(2, cache={"prefix_caching": False})[0]
