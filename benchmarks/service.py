"""`raysonar serve` in a process of its own, for what is measured from outside."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

RAYSONAR = Path(sys.executable).with_name("raysonar")
_START_S = 300.0
_STOP_S = 120.0


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serving(*options: object) -> Iterator[str]:
    """The URL of a service with these options, which is up; it is ended with the context.

    Raises RuntimeError when it does not start, or does not end in time.
    """
    port = free_port()
    command = [RAYSONAR, "serve", *options, "--port", str(port)]
    process = subprocess.Popen(list(map(str, command)), stdout=sys.stderr)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + _START_S
        while not _is_up(url):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the service did not start: status {process.poll()}")
            time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(_STOP_S)


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=30).status_code == 200
    except httpx.HTTPError:
        return False
