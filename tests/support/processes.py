"""Processes in one gloo group, to run functions in: the real collectives, without Ray."""

import contextlib
import multiprocessing
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_S = 60.0


class Processes:
    """Calls an importable function in every process at once: `group(function, *args)` is [function(rank, *args)]."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        for connection in self._connections:
            connection.send((function, args))
        results = []
        for rank, connection in enumerate(self._connections):
            assert wait([connection], DEADLINE_S), f"process {rank} hangs in {function.__name__}{args}"
            good, result = connection.recv()
            assert good, f"process {rank}: {result}"
            results.append(result)
        return results


@contextlib.contextmanager
def processes(world: int, folder: Path) -> Iterator[Processes]:
    """`world` processes that meet over a file in `folder`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    pipes = [context.Pipe() for _ in range(world)]
    workers = [
        context.Process(target=_serve, args=(rank, world, str(folder / "store"), theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pipes)
    ]
    try:
        for worker in workers:
            worker.start()
        yield Processes([ours for ours, _ in pipes])
    finally:
        for ours, _ in pipes:
            ours.close()
        for worker in workers:
            worker.join(5.0)
            worker.kill()


def _serve(rank: int, world: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    timeout = timedelta(seconds=DEADLINE_S / 2)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world, timeout=timeout)
    with contextlib.suppress(EOFError):
        while True:
            function, args = connection.recv()
            try:
                connection.send((True, function(rank, *args)))
            except Exception as error:  # the test is to see it
                connection.send((False, repr(error)))
