"""Healing, in idle time: rows that were computed on moved text are computed again, exactly.

A conversation is read once more from the end of its exact prefix, front to back, in a KV of its own
that never holds an approximate row. Every slice is admitted as exact as soon as it is computed, so
healing can end at any moment and goes on later from what the cache holds. What waits meanwhile is
token ids.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from kvboost.config import RepairParams
from kvboost.model.execution.segment import Hook
from kvboost.results import Healing, HealReport
from kvboost.runtime.audit import AuditTotals
from kvboost.runtime.backend import Backend
from kvboost.runtime.generation import Generation
from kvboost.runtime.idle_work import IdleQueue, IdleWork, Reading, Unhealed
from kvboost.runtime.request import Request, RequestState, Turn
from kvboost.runtime.runtime import Runtime

log = logging.getLogger("kvboost")

MOST_READ_SHARE = 0.5
"""Documents are read in further contexts until this share of the cache's memory is taken: such
copies make others closer, and must not push them out."""
SLICE_ROWS = 128
"""Rows that are computed and admitted at a time. If a request comes, they are given up in the next
layer and computed again later."""

Stop = Callable[[], bool]
"""Whether healing is to end now, because a request needs the model."""


class _Interrupted(Exception):
    """A request needs the model."""


class _Interrupt(Hook):
    """A hook that ends a forward between two layers."""

    def __init__(self, stop: Stop) -> None:
        self._stop = stop

    def check(self) -> None:
        if self._stop():
            raise _Interrupted

    def on_fresh(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.check()


class Healer:
    """Heals the conversations of an engine, one at a time. Thread-safe."""

    def __init__(
        self,
        runtime: Runtime,
        max_kl: float | None,
        repair: Callable[[], RepairParams],
        alarm: Callable[[float], None],
    ) -> None:
        """``alarm`` is called if answers that were repaired as ``repair()`` says are further than
        ``max_kl`` from exact ones, with their mean KL."""
        self._runtime = runtime
        self._queue = runtime.idle_work
        self._queue.on_healed = self._judge
        self._max_kl = max_kl
        self._repair = repair
        self._alarm = alarm
        self._audit = AuditTotals()
        self._seconds = 0.0
        self._working = threading.Lock()
        self._closed = False

    @property
    def has_work(self) -> bool:
        """Whether something waits that could be healed or read now, in idle time."""
        queue = self._queue
        return len(queue) > 0 and not queue.is_held and not self._working.locked()

    def heal_next(self, stop: Stop) -> None:
        """In idle time: heals the next conversation until it is exact or ``stop`` says so, or reads
        the next document. Does nothing while another thread heals."""
        if self._working.acquire(blocking=False):
            try:
                self._heal_next(stop)
            finally:
                self._working.release()

    def heal(
        self, timeout: float | None, is_busy: Stop, wait: Callable[[float | None], bool]
    ) -> HealReport:
        """Heals all conversations that wait, now, and reads all documents, but lets requests go
        first: while ``is_busy``, it calls ``wait`` with the seconds that are left."""
        deadline = None if timeout is None else time.monotonic() + timeout

        def left() -> float | None:
            return None if deadline is None else max(0.0, deadline - time.monotonic())

        def stop() -> bool:
            return left() == 0.0 or is_busy()

        before = self._queue.counts.copy()
        while not self._closed and (len(self._queue) or self._working.locked()):
            rest = left()
            if rest == 0.0 or not wait(rest):
                break
            if self._working.acquire(timeout=-1 if rest is None else rest):
                try:
                    self._heal_next(stop)
                finally:
                    self._working.release()
        counts = self._queue.counts
        return HealReport(
            conversations=counts["done"] - before["done"],
            tokens=counts["healed_tokens"] - before["healed_tokens"],
            waiting=len(self._queue),
            readings=counts["readings done"] - before["readings done"],
        )

    def stats(self) -> dict[str, Any]:
        """Counts of what was healed: ``share`` is that of all approximate rows;
        ``tokens_per_second`` counts the time that healing took. ``readings``: of documents in
        further contexts."""
        counts, seconds = self._queue.counts.copy(), self._seconds
        healed, seen = counts["healed_tokens"], counts["approximate_tokens"]
        return {
            "waiting": len(self._queue.conversations),
            "healed": counts["done"],
            "interrupted": counts["interrupted"],
            "replaced": counts["replaced"],
            "dropped": counts["dropped"],
            "failed": counts["failed"],
            "approximate_tokens": seen,
            "healed_tokens": healed,
            "computed_tokens": counts["computed_tokens"],
            "superseded_chunks": counts["superseded_chunks"],
            "share": healed / seen if seen else None,
            "seconds": seconds,
            "tokens_per_second": counts["computed_tokens"] / seconds if seconds else None,
            "readings": counts["readings done"],
            "readings_tokens": counts["readings computed_tokens"],
            "readings_waiting": len(self._queue.readings),
            "readings_interrupted": counts["readings interrupted"],
            "readings_dropped": counts["readings dropped"],
            "readings_failed": counts["readings failed"],
        }

    def audit_stats(self) -> dict[str, Any]:
        """``replaced``: answers that are not audited, because their conversations went on before
        they were healed."""
        return {
            **self._audit.stats(),
            "waiting": len(self._queue.conversations),
            "replaced": self._queue.counts["replaced"],
            "max_audit_kl": self._max_kl,
        }

    def close(self) -> None:
        """Stops the healing that another thread may be doing, and drops what waits."""
        self._closed = True
        with self._working:
            self._queue.clear()

    def _heal_next(self, stop: Stop) -> None:
        one = self._queue.take()
        if one is None:
            return
        if not self._is_possible(one):
            self._queue.finish(one, "dropped")
            return
        began = time.monotonic()
        try:
            is_done = self._run(one, stop)
        except Exception:  # out of memory, for instance: serving goes on
            log.warning(one.failure, exc_info=True)
            self._queue.finish(one, "failed")
        else:
            if one.epoch != self._runtime.store.epoch:
                self._queue.finish(one, "dropped")
            elif is_done:
                self._queue.finish(one, "done")
                if isinstance(one, Unhealed):
                    self._judge(one.request, one.healing)
            else:
                self._queue.put_back(one)
        finally:
            if isinstance(one, Unhealed):
                self._seconds += time.monotonic() - began

    def _is_possible(self, one: IdleWork) -> bool:
        """Whether the adapter of a request is still loaded, and memory is left for a document."""
        applied, runtime = one.request.adapter, self._runtime
        if applied and not runtime.adapters.is_loaded(applied.adapter):
            return False
        if not isinstance(one, Reading) or runtime.store.used_share <= MOST_READ_SHARE:
            return True
        if not len(self._queue.readings):  # the last one speaks for all
            log.info("half of the cache is taken: documents are read in no further contexts")
        return False

    def _run(self, one: IdleWork, stop: Stop) -> bool:
        """Computes and admits the rows of a text that are not exact; False if it ended before the
        last one."""
        store = self._runtime.store
        # It pauses while it copies many rows, as requests of a batch do.
        state = RequestState(one.request, turn=Turn(slice_rows=SLICE_ROWS), batched=True)
        interrupt = _Interrupt(lambda: self._closed or stop())
        with closing(Generation(self._runtime, state, one.num_logits).heal(one.epoch)) as steps:
            try:
                segment = next(steps)
                while one.epoch == store.epoch:
                    if segment is None:
                        interrupt.check()
                        segment = next(steps)
                        continue
                    if self._runtime.backend.ends_forwards:
                        segment.hook = interrupt
                    else:
                        interrupt.check()
                    logits = self._runtime.model.forward([segment])
                    one.see(logits)
                    self._queue.count(one, "computed_tokens", len(segment))
                    segment = steps.send(logits[:0])
                return False
            except _Interrupted:
                return False
            except StopIteration:
                return True
            finally:
                if isinstance(one, Unhealed):
                    self._count(one)

    def _count(self, one: Unhealed) -> None:
        """Notes how many rows of a conversation are exact in the cache now, and drops the
        approximate copies of these."""
        store, request = self._runtime.store, one.request
        root = self._runtime.root_of(request)
        with store.lookup(root, request.token_ids, pin=False, ask_remote=False) as known:
            exact = known.exact[-1].end if known.exact else 0
        queue, healing = self._queue, one.healing
        healed = max(healing.healed_tokens, exact - one.exact_rows)
        queue.count(one, "healed_tokens", healed - healing.healed_tokens)
        healing.healed_tokens = healed
        dropped = store.drop_superseded(root, request.token_ids, request.repair.name)
        queue.count(one, "superseded_chunks", dropped)

    def _judge(self, request: Request, healing: Healing) -> None:
        """Adds the audit of an answer that was healed to the others."""
        if healing.audit is None:
            return
        self._audit.add(healing.audit, counts_for_alarm=request.repair == self._repair())
        if self._max_kl is not None:
            mean = self._audit.take_alarm(self._max_kl)
            if mean is not None:
                self._alarm(mean)


LEAST_SECONDS, MOST_SECONDS = 0.25, 8.0
LOOK_SECONDS = 0.25
"""How often to look whether requests outside the loop still hold work up. They end without a word:
the garbage collector may end one."""


class Quiet:
    """Says when idle work may begin. Requests come in bursts, and work that begins between two of
    them delays the next one. If a request comes soon after work began, it begins later the next
    time; if it had as much time as it waited, earlier. Use it within one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = LEAST_SECONDS
        self._since = clock()

    def broken(self) -> None:
        """Notes that there are requests now."""
        self._since = self._clock()

    @property
    def seconds_left(self) -> float:
        """For how long no request must come from now on; 0 if work may begin."""
        return max(0.0, self._since + self._seconds - self._clock())

    def used(self, *, interrupted: bool) -> None:
        """Learns from work that has ended now, perhaps because a request came."""
        if self._clock() >= self._since + 2 * self._seconds:
            self._seconds = max(LEAST_SECONDS, self._seconds / 2)
        elif interrupted:
            self._seconds = min(MOST_SECONDS, 2 * self._seconds)


class IdleTime:
    """The idle time of a loop. Use it within one thread."""

    def __init__(self, backend: Backend, healer: Healer, queue: IdleQueue) -> None:
        self._backend, self._healer, self._queue = backend, healer, queue
        self._quiet = Quiet()

    def broken(self) -> None:
        """Notes that there are requests now."""
        self._quiet.broken()

    @property
    def has_work(self) -> bool:
        """Whether something is to be done now, if there are no requests."""
        if self._queue.is_held:
            self._quiet.broken()
        has_some = self._backend.lacks_graphs or self._healer.has_work
        return has_some and not self._quiet.seconds_left

    @property
    def look_again(self) -> float | None:
        """In how many seconds there may be work; None if some must be added before."""
        may_have_some = self._backend.lacks_graphs or len(self._queue)
        return self._quiet.seconds_left or LOOK_SECONDS if may_have_some else None

    def use(self, stop: Stop) -> None:
        """Works until ``stop`` says that a request has come, or one piece is done."""
        self._backend.record_missing(stop)
        if self._healer.has_work and not stop():
            self._healer.heal_next(stop)
        self._quiet.used(interrupted=stop())
