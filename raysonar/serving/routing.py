"""Serve's request router for several replicas of the driver: a prompt goes where its beginning is in the cache."""

import asyncio
import sys
from collections import Counter
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from raysonar.serving.generation import Generation
from raysonar.serving.prefixes import Prefixes, choose, prefix_keys


class PrefixRouter(RequestRouter):
    """Sends a generation to the replica that had the longest part of its beginning, unless that one is overloaded:
    `choose` says when. Everything else goes to the replica with the least to do.

    Each handle remembers what it has sent. Pickled by value with its module, by Serve: what it does lives elsewhere.
    """

    def initialize_state(self, **kwargs: int) -> None:
        """Called by Serve with `request_router_kwargs`: `spread`, as for `choose`."""
        self._spread = kwargs["spread"]
        self._prefixes: Prefixes[ReplicaID] = Prefixes()
        self._sent: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The replica of choice, then all others, for when it takes no more."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # Serve waits before it asks again
        by_id = {replica.replica_id: replica for replica in candidate_replicas}
        if not by_id:
            return []
        await asyncio.sleep(0)  # the request that was routed before this one is sent first, and counts
        loads = await self._loads(candidate_replicas)
        held = {replica: self._prefixes.held(replica) for replica in by_id}
        first = choose(loads, self._prefixes.depths(_keys(pending_request)), held, self._spread)
        return [[by_id.pop(first)], [*by_id.values()]]

    async def _loads(self, replicas: list[RunningReplica]) -> dict[ReplicaID, int]:
        """Each replica's ongoing requests: as many as it said, or as were sent from here, which may not have arrived;
        one that does not say is as busy as can be."""
        known = {each.replica_id: self.replica_queue_len_cache.get(each.replica_id) for each in replicas}
        unknown = [each for each in replicas if known[each.replica_id] is None]
        for replica, load in await self._probe_queue_lens(unknown, 0):
            known[replica.replica_id] = load
        return {each: sys.maxsize if load is None else max(load, self._sent[each]) for each, load in known.items()}

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Called by Serve for each request that is sent."""
        super().on_send_request(replica_id)
        self._sent[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Serve when a request has ended, or could not be sent."""
        self._sent[replica_id] = max(0, self._sent[replica_id] - 1)

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """Called by Serve when a replica has taken the request."""
        self._prefixes.note(_keys(pending_request), replica_id)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Serve when replicas have come or gone."""
        super().update_replicas(replicas)
        there = {replica.replica_id for replica in replicas}
        self._prefixes.keep(there)
        self._sent = Counter({replica: count for replica, count in self._sent.items() if replica in there})


def _keys(request: PendingRequest | None) -> list[bytes]:
    """Of a generation's first prompt; none of other calls."""
    generation = request.args[0] if request is not None and request.args else None
    return prefix_keys(generation.prompts[0]) if isinstance(generation, Generation) else []
