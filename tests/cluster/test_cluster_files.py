"""cluster/: Ray's own code and schemas, and KubeRay's, take every file; and the files agree with serve_configs/."""

import argparse
import json
import re
import shlex
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from raysonar.cli.batch import add_batch
from raysonar.config import ServiceConfig, parse_service_config
from raysonar.ranks.resources import rank_resources
from raysonar.serving.app import BUILDER, application_args

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "cluster"
CONFIGS = ROOT / "serve_configs"
KUBERAY = yaml.safe_load((ROOT / "tests/support/data/kuberay.yaml").read_text())
LAUNCHER = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
BOOT_S = 900
"""More than a GPU node of a cloud needs to boot, and to fetch the image or to install what is missing."""
IMAGE = re.search(r"docker build .* -t (\S+)", (CLUSTER / "Dockerfile").read_text())
MANIFESTS = ["raycluster", "rayjob", "rayservice"]


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / name).read_text())


def manifest(name: str) -> dict[str, Any]:
    return load(f"kuberay/{name}.yaml")


def cluster_of(resource: dict[str, Any]) -> dict[str, Any]:
    """The Ray cluster in a resource of KubeRay's."""
    key = {"RayService": "rayClusterConfig", "RayJob": "rayClusterSpec"}.get(resource["kind"])
    return resource["spec"] if key is None else resource["spec"][key]


def autoscaling(cluster: dict[str, Any]) -> dict[str, Any]:
    """What Ray's autoscaler makes of a Ray cluster of KubeRay's; it validates that with the launcher's schema."""
    return _derive_autoscaling_config_from_ray_cr({"metadata": {"name": "x", "namespace": "y"}, "spec": cluster})


def engines_that_fit(nodes: dict[str, Any], config: ServiceConfig) -> int:
    """Groups that the cluster's worker nodes hold, each on one node."""
    assert config.engine.parallel.placement == "STRICT_PACK"
    rank = rank_resources(config.engine)
    found = 0
    for node in nodes.values():
        ranks = min(node["resources"].get(name, 0) // need for name, need in rank.items())
        found += node["max_workers"] * int(ranks // config.engine.parallel.world)
    return found


def service_config(name: str) -> ServiceConfig:
    return parse_service_config(application_args(CONFIGS / f"{name}.yaml"))


def test_there_is_a_file_for_each_kind_of_cluster():
    assert {path.stem for path in CLUSTER.glob("*.yaml")} == {"aws", "on-premise"}
    assert {path.stem for path in (CLUSTER / "kuberay").glob("*.yaml")} == set(MANIFESTS)
    assert [manifest(name)["kind"] for name in MANIFESTS] == ["RayCluster", "RayJob", "RayService"]


@pytest.mark.parametrize("name", MANIFESTS)
def test_kuberay_knows_every_field_of_a_manifest(name: str):
    jsonschema.Draft202012Validator.check_schema(KUBERAY)
    jsonschema.validate(manifest(name), KUBERAY)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every mapping in a document that a schema describes."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if isinstance(value, dict) and not {"requests", "limits", "rayStartParams"} & set(path):
        yield path
    for key, each in inner:
        yield from paths(each, (*path, key))


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_field_that_kuberay_does_not_know_is_noticed_wherever_it_is(name: str):
    good = manifest(name)
    places = list(paths(good))
    assert len(places) > 20
    for place in places:
        bad = deepcopy(good)
        inner = bad
        for key in place:
            inner = inner[key]
        inner["fieldd"] = "x"
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, KUBERAY)


@pytest.mark.parametrize("name", MANIFESTS)
def test_rays_autoscaler_reads_a_manifest(name: str):
    config = autoscaling(cluster_of(manifest(name)))
    head = config["available_node_types"].pop("headgroup")
    assert (head["max_workers"], head["resources"]["CPU"]) == (0, 0)
    assert "GPU" not in head["resources"]
    workers = config["available_node_types"]
    assert all(node["resources"]["GPU"] > 0 and node["min_workers"] == 0 for node in workers.values())
    assert config["idle_timeout_minutes"] * 60 > BOOT_S


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_manifest_runs_the_image_and_the_ray_that_the_dockerfile_makes(name: str):
    cluster = cluster_of(manifest(name))
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert IMAGE
    assert {c["image"] for group in groups for c in group["template"]["spec"]["containers"]} == {IMAGE[1]}
    version = re.search(r"^FROM rayproject/ray:([\d.]+)-", (CLUSTER / "Dockerfile").read_text(), re.M)
    assert version
    assert cluster["rayVersion"] == version[1]
    assert f"ray[serve]>={version[1]}" in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("name", MANIFESTS)
def test_a_pods_volumes_are_those_that_it_mounts_and_its_group_asks_for_a_token(name: str):
    cluster = cluster_of(manifest(name))
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert cluster["authOptions"]["mode"] == "token"


def test_the_service_of_the_manifest_is_that_of_serve_configs_open_to_those_with_a_key():
    resource = manifest("rayservice")
    values = yaml.safe_load(resource["spec"]["serveConfigV2"])
    schema = ServeDeploySchema.model_validate(values)
    (application,) = schema.applications
    assert application.import_path == BUILDER
    file = CONFIGS / "deepseek-v2-lite-autoscaling.yaml"
    args, expected = dict(application.args), application_args(file)
    keys = Path(args.pop("api_keys_file"))
    assert args == expected
    expected_http = yaml.safe_load(file.read_text())["http_options"]
    assert values["http_options"] == expected_http | {"host": "0.0.0.0"}
    head = resource["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in head["containers"][0]["volumeMounts"]}
    assert keys.parent == Path(mounts["api-keys"])
    (secret,) = [volume["secret"]["secretName"] for volume in head["volumes"] if "secret" in volume]
    command = f"kubectl create secret generic {secret} --from-file={keys.name}="
    assert command in (CLUSTER / "kuberay/rayservice.yaml").read_text()
    ports = [port["containerPort"] for port in head["containers"][0]["ports"]]
    assert values["http_options"]["port"] in ports


@pytest.mark.parametrize("name", ["rayservice", "raycluster"])
def test_kubernetes_has_pods_for_all_replicas_that_the_service_may_have(name: str):
    config = service_config("deepseek-v2-lite-autoscaling")
    nodes = autoscaling(cluster_of(manifest(name)))["available_node_types"]
    assert engines_that_fit(nodes, config) == config.replicas.max > 1


def test_the_replicas_of_the_autoscaling_configuration_are_those_of_the_fixed_one():
    scaled, fixed = service_config("deepseek-v2-lite-autoscaling"), service_config("deepseek-v2-lite-8gpu")
    assert scaled.engine == fixed.engine
    assert fixed.replicas.fixed
    assert not scaled.replicas.fixed
    # a request that waits for a node, and for the model on it, is not given up before
    assert scaled.start_timeout_s > BOOT_S


def test_the_job_of_the_manifest_is_a_batch_that_its_cluster_has_nodes_for():
    resource = manifest("rayjob")
    words = shlex.split(resource["spec"]["entrypoint"])
    assert words[0] == "raysonar"
    parser = argparse.ArgumentParser()
    add_batch(parser.add_subparsers())
    options = parser.parse_args(words[1:])
    # the image has the repository at this path
    assert "COPY --chown=ray:users . /home/ray/raysonar" in (CLUSTER / "Dockerfile").read_text()
    config = service_config(options.config.stem)
    assert options.config == Path("/home/ray/raysonar/serve_configs") / f"{options.config.stem}.yaml"
    cluster = cluster_of(resource)
    assert engines_that_fit(autoscaling(cluster)["available_node_types"], config) == options.replicas
    # a group waits for its places as long as for its model: all pods are asked for before the job begins
    assert [group["replicas"] for group in cluster["workerGroupSpecs"]] == [options.replicas]


@pytest.mark.parametrize("name", ["aws", "on-premise"])
def test_rays_launcher_takes_the_file(name: str):
    values = load(f"{name}.yaml")
    jsonschema.validate(values, LAUNCHER)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(values | {"fieldd": 1}, LAUNCHER)
    prepared = prepare_config(deepcopy(values))
    validate_config(prepared)
    assert prepared["idle_timeout_minutes"] * 60 > BOOT_S
    for start in (prepared["head_start_ray_commands"][-1], prepared["worker_start_ray_commands"][-1]):
        assert "RAY_AUTH_MODE=token ~/venv/bin/ray start" in start
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in prepared["head_start_ray_commands"][-1]
    assert prepared["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


def test_on_premise_keeps_all_hosts_in_the_cluster():
    values = load("on-premise.yaml")
    (node,) = prepare_config(deepcopy(values))["available_node_types"].values()
    hosts = len(values["provider"]["worker_ips"])
    assert (node["min_workers"], node["max_workers"], values["max_workers"]) == (hosts, hosts, hosts)


def test_aws_brings_as_many_nodes_as_the_service_may_have_replicas():
    values = load("aws.yaml")
    prepared = prepare_config(deepcopy(values))
    nodes = prepared["available_node_types"]
    head = nodes.pop(prepared["head_node_type"])
    assert (head["max_workers"], head["resources"]["GPU"]) == (0, 0)
    config = service_config("deepseek-v2-lite-autoscaling")
    assert engines_that_fit(nodes, config) == config.replicas.max == values["max_workers"]
    assert all(node["min_workers"] == 0 for node in nodes.values())


@pytest.mark.parametrize("file", ["aws.yaml", "on-premise.yaml", *(f"kuberay/{name}.yaml" for name in MANIFESTS)])
def test_the_files_that_a_comment_names_are_there(file: str):
    names = re.findall(r"\b((?:cluster|serve_configs|docs)/[\w./-]*\w)", (CLUSTER / file).read_text())
    assert len(names) >= 1
    assert [name for name in names if not (ROOT / name).exists()] == []
