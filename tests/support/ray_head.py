"""A Ray head with a dashboard and job server, in processes of its own."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ray.job_submission import JobStatus, JobSubmissionClient
from service import free_port

DEADLINE_S = 180.0


@contextmanager
def head(cpus: int) -> Iterator[JobSubmissionClient]:
    """Its job server. All that it started has ended afterwards."""
    dashboard = free_port()
    ports = {
        "port": free_port(),
        "dashboard-port": dashboard,
        "dashboard-agent-listen-port": free_port(),
        "ray-client-server-port": free_port(),
        "metrics-export-port": free_port(),
        "num-cpus": cpus,
        "object-store-memory": 100 << 20,
    }
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    environment.pop("RAY_ADDRESS", None)
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:  # sockets need short names
        options = [f"--{name}={value}" for name, value in ports.items()]
        process = subprocess.Popen(
            [
                Path(sys.executable).with_name("ray"),
                *("start", "--head", "--block", "--node-ip-address=127.0.0.1", "--dashboard-host=127.0.0.1"),
                *(f"--temp-dir={folder}", *options),
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
        try:
            yield _client(f"http://127.0.0.1:{dashboard}", process)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)


def _client(address: str, process: "subprocess.Popen[bytes]") -> JobSubmissionClient:
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return JobSubmissionClient(address)
        except (ConnectionError, RuntimeError):
            assert process.poll() is None, "the head did not start"
            assert time.monotonic() < deadline, "no job server"
            time.sleep(0.5)


def submit(client: JobSubmissionClient, entrypoint: str) -> str:
    """Submit a job, as soon as the head's agent is there to take it; returns its id."""
    variables = {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return str(client.submit_job(entrypoint=entrypoint, runtime_env={"env_vars": variables}))
        except RuntimeError as error:
            if "No available agent" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.5)


def wait_for(client: JobSubmissionClient, job: str) -> JobStatus:
    """The job's final status."""
    deadline = time.monotonic() + DEADLINE_S
    while not (status := client.get_job_status(job)).is_terminal():
        assert time.monotonic() < deadline, f"the job is {status}"
        time.sleep(0.2)
    return status
