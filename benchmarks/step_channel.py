"""What the step channel costs: its round trip, and the share of time in which ranks wait for a plan.

    python benchmarks/step_channel.py --ranks 1 2 4

The round trip is that of an empty plan to another process on this node, which sends it back. The shares are of the demo
model (data-parallel rows), of engines with one plan in flight and with two that take turns. They are from the step
records: time without a plan, over that and verifying and drafting.
"""

import argparse
import multiprocessing
import socket
import statistics
import sys
import time
from contextlib import ExitStack

import ray
from measure import emit, in_turn, machine, table

from raysonar import Engine, SamplingParams
from raysonar.demo import TARGET
from raysonar.ranks.connections import StepConnections
from raysonar.ranks.frames import receive_frame, send_frame
from raysonar.step import StepPlan

WARM_UP = 200


def echo(port: int) -> None:
    """Send every frame back, until the other side is gone."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while True:
            try:
                kind, payload = receive_frame(connection)
            except OSError:
                return
            send_frame(connection, kind, payload)


def round_trips(count: int) -> list[float]:
    """Microseconds of an empty plan's way to another process and back."""
    plan = StepPlan().pack()
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = multiprocessing.get_context("spawn").Process(target=echo, args=(server.getsockname()[1],))
        process.start()
        connection, _ = server.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    channel = StepConnections({0: connection}, leaders=[0])
    times = []
    for _ in range(WARM_UP + count):
        start = time.perf_counter()
        channel.send([plan])
        channel.receive(10.0)
        times.append(1e6 * (time.perf_counter() - start))
    channel.close()
    process.join(10.0)
    return times[WARM_UP:]


def run(engine: Engine, rows: int, tokens: int) -> dict[str, float]:
    """Full batches decoding: seconds waited, seconds in all, tokens a second."""
    before = engine.stats()
    prompts = [list(range(5, 21 + i % 7)) for i in range(rows)]
    start = time.perf_counter()
    engine.generate(prompts, SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True))
    seconds, after = time.perf_counter() - start, engine.stats()
    steps = after.steps - before.steps
    waited, spent = after.wait_seconds - before.wait_seconds, after.rank_seconds - before.rank_seconds
    return {"share": waited / spent, "wait_us": 1e6 * waited / steps, "tokens_per_second": rows * tokens / seconds}


def shares(ranks: int, drafts: int, options: argparse.Namespace) -> list[dict[str, object]]:
    """A row of figures for each number of plans in flight."""
    with ExitStack() as engines:
        sides = {}
        for plans in (1, 2):
            engine = Engine.from_folder(
                TARGET,
                threads=1,
                max_running=options.rows,
                data_parallel=ranks,
                plans_in_flight=plans,
                speculative_tokens=drafts,
                micro_batching=options.micro_batching,
            )
            engines.enter_context(engine)
            run(engine, ranks * options.rows, 8)
            sides[str(plans)] = lambda engine=engine: run(engine, ranks * options.rows, options.tokens)
        values = in_turn(sides, options.rounds)
    return [
        {"ranks": ranks, "k": drafts, "plans": plans}
        | {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        for plans, rounds in values.items()
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Time the step channel.")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rows", type=int, default=8, help="rows of each rank (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="of each answer (default: %(default)s)")
    parser.add_argument("--speculative-tokens", type=int, nargs="+", default=[0, 1], help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-trips", type=int, default=5000)
    parser.add_argument("--micro-batching", choices=("never", "always"), default="never")
    options = parser.parse_args()
    emit(**machine())
    trips = round_trips(options.round_trips)
    emit(round_trip_us=statistics.median(trips), p99_us=statistics.quantiles(trips, n=100)[98])
    if max(options.ranks) > 1:
        ray.init(address="local", num_cpus=2 * max(options.ranks), include_dashboard=False, log_to_driver=False)
    rows = []
    for ranks in options.ranks:
        for drafts in options.speculative_tokens:
            for row in shares(ranks, drafts, options):
                emit(**row)
                rows.append(row)
    table(rows)


if __name__ == "__main__":
    sys.exit(main())
