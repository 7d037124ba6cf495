"""Commands to the cache, which requests carry: statistics, and forgetting.

A request with a command waits in vLLM's queue until all workers have done what it asks, and its
answer says what they did. To forget, a thread first finds the chunks: it looks at all of them and
lists the remote store, while the scheduler goes on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kvboost.cache.data import ChunkData
from kvboost.integrations.vllm.options import Command
from kvboost.integrations.vllm.planner import Found, Planner, prompt_ids
from kvboost.integrations.vllm.tally import Tally, sum_tiers
from kvboost.tokens.hashing import ChunkKey

logger = logging.getLogger("kvboost")

CLOSED = (
    "KVBoost reuses nothing in this vLLM, so it holds nothing; warnings in its log at the start "
    "say why"
)
MOST_PENDING = 16
"""Commands that may wait at a time: each makes the scheduler look at all chunks."""
TOO_MANY = f"{MOST_PENDING} commands wait already; ask again when they are done"
_FIGURES = ("chunks", "bytes", "max_bytes", "hits")


@dataclass(frozen=True)
class Reply:
    """From a worker."""

    tiers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    left: Mapping[str, int] = field(default_factory=dict)
    """Chunks that may not have been removed, by tier."""
    problem: str = ""


@dataclass(frozen=True)
class Order:
    """To every worker: remove ``keys`` from every tier, and say what the tiers hold."""

    request_id: str
    keys: tuple[ChunkKey, ...] | None = None
    """None removes nothing."""

    def obey(self, data: ChunkData) -> Reply:
        """In a worker. Waits for files and the network."""
        try:
            left = {} if self.keys is None else data.purge(self.keys)
            tiers = {name: tier.as_dict() for name, tier in data.stats().items()}
            if (remote := data.remote_stats()) is not None:
                tiers["remote"] = remote.as_dict()
            return Reply(tiers, left)
        except Exception as error:  # nothing that goes wrong here may stop vLLM
            return Reply(problem=_problem(error))


@dataclass
class _Pending:
    command: Command
    salt: str
    search: Future[Found] | None = None
    found: Found | None = None
    replies: list[Reply] = field(default_factory=list)


class Commands:
    """The scheduler's side. Not thread-safe."""

    def __init__(self, planner: Planner, tally: Tally) -> None:
        self._planner = planner
        self._tally = tally
        self._num_workers = 0
        self._pending: dict[str, _Pending] = {}
        self._orders: list[Order] = []
        self._answers: dict[str, dict[str, Any]] = {}
        self._thread = ThreadPoolExecutor(1, "kvboost-forget")

    def open(self, num_workers: int) -> None:
        self._num_workers = num_workers

    def begin(self, request_id: str, command: Command, salt: str) -> None:
        if not self._planner.is_open or len(self._pending) >= MOST_PENDING:
            self._answers[request_id] = {"error": TOO_MANY if self._planner.is_open else CLOSED}
            return
        self._pending[request_id] = _Pending(command, salt)
        if command.name == "stats":
            self._orders.append(Order(request_id))

    def waits(self, request_id: str) -> bool:
        """Whether the answer to a command is not there yet. Goes on with it."""
        pending = self._pending.get(request_id)
        if pending is None:
            return False
        if pending.search is None or pending.found is not None or not pending.search.done():
            return True
        if (error := pending.search.exception()) is not None:
            del self._pending[request_id]
            self._answers[request_id] = {"error": _problem(error)}
            return False
        pending.found = pending.search.result()
        self._planner.gone(pending.found.keys)
        self._orders.append(Order(request_id, tuple(pending.found.keys)))
        return True

    def is_forgetting(self, salt: str) -> bool:
        """Whether something under ``salt`` is being forgotten now."""
        return any(
            pending.command.name == "forget" and pending.salt == salt
            for pending in self._pending.values()
        )

    def take_orders(self) -> list[Order]:
        """For the next step. A search begins, if no other is under way: what requests before it
        have left is entered now."""
        if not self._pending and not self._orders:  # as a rule
            return []
        forgetting = [one for one in self._pending.values() if one.command.name == "forget"]
        if all(one.search is None or one.search.done() for one in forgetting):
            for pending in forgetting:
                if pending.search is None:
                    self._search(pending)
                    break
        orders, self._orders = self._orders, []
        return orders

    def hear(self, replies: Mapping[str, Sequence[Reply]]) -> None:
        """Some workers have replied."""
        for request_id, some in replies.items():
            pending = self._pending.get(request_id)
            if pending is None:  # its client has gone
                continue
            pending.replies += some
            if len(pending.replies) >= self._num_workers:
                self._answers[request_id] = self._answer(pending)
                del self._pending[request_id]

    def take_answer(self, request_id: str) -> dict[str, Any] | None:
        """The answer of a request that has ended; None if it had no command, or did not wait."""
        pending = self._pending.pop(request_id, None)
        if pending is not None and pending.search is not None:
            pending.search.cancel()  # if it has not begun
        return self._answers.pop(request_id, None)

    def close(self) -> None:
        self._thread.shutdown()

    def _search(self, pending: _Pending) -> None:
        texts = pending.command.texts
        ids = None if texts is None else [prompt_ids(one) for one in texts]
        pending.search = self._thread.submit(self._planner.search(pending.salt, ids))

    def _answer(self, pending: _Pending) -> dict[str, Any]:
        for reply in pending.replies:
            if reply.problem:
                return {"error": reply.problem}
        if pending.found is None:
            return {"stats": self._stats(pending)}
        answer: dict[str, Any] = {"forgotten": len(pending.found.keys)}
        left = Counter[str]()
        for reply in pending.replies:
            left |= Counter(reply.left)  # the most of any worker
        if left:
            places = " and ".join(f"{count} in {place}" for place, count in left.items())
            answer["error"] = (
                f"not all of them could be removed: {places} may be left; see that it can be "
                "written and ask again"
            )
        elif pending.found.problem:
            answer["error"] = f"others may be left: {pending.found.problem}"
        return answer

    def _stats(self, pending: _Pending) -> dict[str, Any]:
        of_workers = [reply.tiers for reply in pending.replies]
        tiers: dict[str, Any] = sum_tiers(of_workers, _FIGURES)
        for name, tier in tiers.items():
            faults = Counter[str]()
            for of_worker in of_workers:
                faults.update(of_worker.get(name, {}).get("faults", {}))
            tier["faults"] = dict(faults)
        return {
            "chunks": self._planner.num_chunks(),
            "chunks_of_salt": self._planner.num_chunks(pending.salt),
            "tiers": tiers,
            **self._tally.totals(),
        }


def _problem(error: BaseException) -> str:
    """The text of an error for a client. The log says the rest: clients need no paths."""
    logger.warning("KVBoost could not do what a command asks", exc_info=error)
    said = error.strerror if isinstance(error, OSError) else None
    return f"{type(error).__name__}{f': {said}' if said else ''}; vLLM's log says more"
