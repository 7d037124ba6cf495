"""The request router of Ray Serve that looks at content.

It scores replicas as ``kvboost route`` scores servers. What a replica knows is what this router has
sent there and what the replica reports that others have sent. Serve gives the class by its import
path, and may have pickled the caller's module by value, so a request's sketch is recognised by its
attributes, never by its type.
"""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from kvboost.deploy.content import NOTHING, Sketch
from kvboost.deploy.router import Choice, Expected, Flight, Router, RouterSettings


class ContentRouter(RequestRouter):
    """Without Serve's ``FIFOMixin``: that gives a replica to whichever request is the oldest, not
    to the one it was chosen for."""

    def initialize_state(self, policy: str = "content", remember: int = 1 << 22) -> None:
        self.scores = Router((), RouterSettings(policy, remember))
        self._flights: dict[str, Flight] = {}
        self._reports: dict[str, object] = {}

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        replicas = {one.replica_id.unique_id: one for one in candidate_replicas}
        for name, replica in replicas.items():
            self.scores.add(name)
            self._learn(name, replica.routing_stats or {})
        ranks = self.scores.rank(
            _sketch(pending_request), tuple(replicas), self._elsewhere(replicas)
        )
        return [[replicas[choice.upstream]] for choice in ranks]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        name, sketch = replica_id.unique_id, _sketch(pending_request)
        self.scores.add(name)
        flight = self.scores.send(Choice(name, Expected(), 0.0), sketch)
        self._flights[pending_request.metadata.internal_request_id] = flight

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        flight = self._flights.pop(internal_request_id, None)
        if flight is not None:
            flight.end(was_read=True)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)
        self.scores.remove(replica_id.unique_id)
        self._reports.pop(replica_id.unique_id, None)

    def _learn(self, name: str, stats: dict[str, Any]) -> None:
        """Adds what a replica reports, once for each report."""
        if stats.get("number") in (None, self._reports.get(name)):
            return
        self._reports[name] = stats["number"]
        known = self.scores.known(name)
        known.blocks.add(stats["blocks"])
        known.marks.add(stats["marks"])

    def _elsewhere(self, replicas: dict[str, RunningReplica]) -> dict[str, int]:
        """Requests that replicas have from other routers, as far as Serve knows."""
        cached = self.replica_queue_len_cache
        return {
            name: max(0, (cached.get(one.replica_id) or 0) - self.scores.open_requests(name))
            for name, one in replicas.items()
        }


def _sketch(pending: PendingRequest | None) -> Sketch:
    """The sketch among a request's arguments."""
    for argument in pending.args if pending is not None else ():
        if hasattr(argument, "marks") and hasattr(argument, "blocks"):
            found: Sketch = argument
            return found
    return NOTHING
