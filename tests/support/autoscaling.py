"""Ray's autoscaler on one machine: a cluster whose nodes are processes here that come when something has no place.

It lives in process and network namespaces of its own, so that it uses Ray's usual ports and ends as a whole.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from overlap.hosts import RAY, await_node

ALONE = ["unshare", "--pid", "--net", "--fork", "--mount-proc", "--kill-child"]


def unavailable() -> str | None:
    """Why there can be no such cluster here; None when there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    if not (shutil.which("unshare") and shutil.which("ip")):
        return "namespaces need util-linux and iproute2 (unshare, ip)"
    probe = subprocess.run([*ALONE, "ip", "link", "set", "lo", "up"], capture_output=True, text=True, check=False)
    return f"no namespaces here: {probe.stderr.strip()}" if probe.returncode else None


def alone(command: list[str]) -> list[str]:
    """The command that runs a command in namespaces of its own; all that it leaves behind ends with it."""
    return [*ALONE, "sh", "-c", 'ip link set lo up && "$@"', "sh", *command]


def configuration(workers: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Of Ray's launcher: a head without resources, and `workers`, by their type.

    The head is marked as Ray's own cluster of tests does it; its example file is not in Ray's wheel.
    """
    head = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    provider = {"type": "fake_multinode", "use_node_id_as_ip": True, "disable_node_updaters": True}
    commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        "cluster_name": "autoscaling",
        "provider": {**provider, "disable_launch_config_check": True},
        "head_node_type": "ray.head.default",
        "available_node_types": {"ray.head.default": head, **workers},
        "max_workers": sum(worker["max_workers"] for worker in workers.values()),
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": 0.1,
        **{f"{name}_commands": [] for name in commands},
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        "file_mounts_sync_continuously": False,
    }


@contextmanager
def cluster(folder: Path, sockets: Path, workers: dict[str, dict[str, Any]]) -> Iterator[str]:
    """The cluster, called inside `alone`; gives its address. Logs go to `folder`; `sockets` is to have a short name."""
    file, log = folder / "autoscaling.json", folder / "head.log"
    file.write_text(json.dumps(configuration(workers)))
    command = [str(RAY), "start", "--head", "--block", f"--autoscaling-config={file}", f"--temp-dir={sockets}"]
    command += ["--num-cpus=0", "--object-store-memory=80000000", "--include-dashboard=false", "--disable-usage-stats"]
    environment = {**os.environ, "RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
    with log.open("wb") as output:
        head = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        await_node(log, head)
        yield "127.0.0.1:6379"
    finally:
        head.kill()  # what it has started ends with the namespaces
        head.wait(30)
