"""The router as Serve calls it, with replicas that only say how many requests they have."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, RequestMetadata
from ray.serve.request_router import PendingRequest, ReplicaID

from raysonar.driver.params import SamplingParams
from raysonar.serving.generation import Generation
from raysonar.serving.routing import PrefixRouter

DRIVER = DeploymentID(name="Driver", app_name="tests")
SPREAD = 3
PROMPTS = {kind: kind * 600 for kind in "abc"}


class Replica:
    """As much of Serve's RunningReplica as is asked for; `load` None does not answer."""

    max_ongoing_requests = 100

    def __init__(self, name: str, load: int | None = 0) -> None:
        self.replica_id = ReplicaID(name, DRIVER)
        self.load = load

    async def get_queue_len(self, *, deadline_s: float) -> int:
        if self.load is None:
            await asyncio.sleep(60)
        assert self.load is not None
        return self.load


class Router:
    """A router and two replicas or more."""

    def __init__(self, *replicas: Replica) -> None:
        self.router = PrefixRouter(deployment_id=DRIVER, handle_source=DeploymentHandleSource.REPLICA)
        self.router.initialize_state(spread=SPREAD)
        self.replicas = list(replicas)
        self.router.update_replicas(self.replicas)

    async def send(self, prompt: str) -> str:
        """The replica that is chosen, which takes the request."""
        request = pending(Generation("id", [prompt], SamplingParams()))
        (first, *_), *_ = await self.router.choose_replicas(self.replicas, request)
        self.router.on_request_routed(request, first.replica_id, None)
        return first.replica_id.unique_id


def pending(*args: Any) -> PendingRequest:
    metadata = RequestMetadata(request_id="r", internal_request_id="i", call_method="stream")
    return PendingRequest(args=list(args), kwargs={}, metadata=metadata)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Loads are those that the replicas say now, not those remembered."""

    @pytest.mark.usefixtures("fresh_loads")
    def wrapped() -> None:
        asyncio.run(test())

    wrapped.__name__, wrapped.__doc__ = test.__name__, test.__doc__
    return wrapped


@pytest.fixture
def fresh_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.serve._private.request_router.common.ReplicaQueueLengthCache.get", lambda *_: None)


@run
async def test_prompts_go_where_their_beginnings_went():
    made = Router(Replica("x"), Replica("y"))
    first = {kind: await made.send(prompt) for kind, prompt in PROMPTS.items()}
    assert set(first.values()) == {"x", "y"}
    for _ in range(3):
        assert {kind: await made.send(f"{prompt} more") for kind, prompt in PROMPTS.items()} == first


@run
async def test_a_replica_with_much_more_to_do_is_left_alone():
    made = Router(Replica("x"), Replica("y", 1))
    assert await made.send(PROMPTS["a"]) == "x"
    made.replicas[0].load = 1 + SPREAD
    assert await made.send(PROMPTS["a"]) == "x"
    made.replicas[0].load = 2 + SPREAD
    assert await made.send(PROMPTS["a"]) == "y"
    # both have it now: the one with less to do
    made.replicas[0].load = 0
    assert await made.send(PROMPTS["a"]) == "x"


@run
async def test_what_was_sent_counts_before_it_has_arrived():
    made = Router(Replica("x"), Replica("y"))
    replicas = {replica.replica_id.unique_id: replica.replica_id for replica in made.replicas}
    assert await made.send(PROMPTS["a"]) == "x"
    for _ in range(1 + SPREAD):
        made.router.on_send_request(replicas["x"])
    assert await made.send(PROMPTS["a"]) == "y"
    for _ in range(2 + SPREAD):  # one more: a request that could not be sent has ended, too
        made.router.on_request_completed(replicas["x"], "id")
    made.router.on_send_request(replicas["y"])
    assert await made.send(PROMPTS["a"]) == "x"


@run
async def test_what_is_gone_is_forgotten():
    made = Router(Replica("x"), Replica("y", 2))
    assert await made.send(PROMPTS["a"]) == "x"
    made.replicas = [Replica("z", 1), made.replicas[1]]
    made.router.update_replicas(made.replicas)
    assert await made.send(PROMPTS["a"]) == "z"
    assert {replica.unique_id for replica in made.router._prefixes._held} == {"z"}


@run
async def test_a_replica_that_does_not_answer_is_the_last_choice():
    made = Router(Replica("x"), Replica("y", 9))
    assert await made.send(PROMPTS["a"]) == "x"
    made.replicas[0].load = None
    assert await made.send(PROMPTS["a"]) == "y"


@run
async def test_calls_that_are_no_generation_go_to_who_has_the_least_to_do():
    made = Router(Replica("x", 2), Replica("y", 1))
    for request in (pending("text", True), pending(), None):
        first, others = await made.router.choose_replicas(made.replicas, request)
        assert [replica.replica_id.unique_id for replica in (*first, *others)] == ["y", "x"]


@run
async def test_serve_waits_before_it_asks_again():
    made, request = Router(Replica("x")), pending("text")
    assert not request.routing_context.should_backoff
    await made.router.choose_replicas(made.replicas, request)
    assert request.routing_context.should_backoff
    assert await made.router.choose_replicas([], request) == []
