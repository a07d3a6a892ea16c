"""One Ray for all tests that need one."""

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A local Ray with places for eight ranks, whatever the machine has."""
    os.environ.update(RAY_AUTH_MODE="disabled", RAY_USAGE_STATS_ENABLED="0")
    import ray

    ray.init(address="local", num_cpus=8, include_dashboard=False, object_store_memory=128 << 20, log_to_driver=False)
    try:
        yield
    finally:
        ray.shutdown()
