"""Many requests through one model: every step packs the rows they need into one forward.

One thread runs it, from the first request on. A turn reads aloud: let go of who has left, start
whom there is room for, pick rows, run them, hand everyone their logits.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from kvboost.config import EngineConfig, GenerationMode
from kvboost.errors import KVBoostError, KVTooLargeError, ShuttingDownError
from kvboost.model.forward import Forward
from kvboost.model.machine import memory_bytes
from kvboost.model.segment import Segment
from kvboost.results import GenerationResult, SpanKind
from kvboost.runtime.generation import Generation, Steps
from kvboost.runtime.request import RequestState
from kvboost.runtime.runtime import Runtime
from kvboost.runtime.scheduler import Job, Scheduler
from kvboost.runtime.streams import FutureAnswer

STEP_ROWS_ON_CPU = 256
STEP_ROWS_ON_GPU = 2048
MEMORY_SHARE = 0.25

Watch = Callable[[RequestState, Steps], Steps]


class AnswerListener(Protocol):
    """Who waits for an answer. Called by the loop's thread, and must not keep it waiting."""

    def push(self, pieces: list[str]) -> None:
        """More text is there."""

    def end(self, error: BaseException | None) -> None:
        """Nothing more comes."""


@dataclass(eq=False)
class Ticket(Job):
    """A request in the loop."""

    state: RequestState = field(kw_only=True)
    sink: AnswerListener = field(kw_only=True)
    steps: Steps | None = None
    need: Segment | None = None
    """The rows it needs next; None if it only has to be asked again."""
    shown: int = 0
    cancelled: bool = False
    runs_alone: bool = False
    """It was in a batch that failed and could not simply be run again."""


class Loop:
    """Safe to call from several threads."""

    def __init__(
        self, runtime: Runtime, forward: Forward, config: EngineConfig, watch: Watch
    ) -> None:
        """``watch`` sees every request's steps on their way."""
        self._runtime = runtime
        self._forward = forward
        self._watch = watch
        on_cpu = forward.shape.device.type == "cpu"
        rows = config.step_rows or (STEP_ROWS_ON_CPU if on_cpu else STEP_ROWS_ON_GPU)
        self._scheduler: Scheduler[Ticket] = Scheduler(config, rows)
        self._config = config
        self.max_kv_bytes = _kv_budget(config, forward.shape.device)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._draining = False
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._batch_sizes: Counter[int] = Counter()
        self._finished: Counter[str] = Counter()

    def submit(
        self,
        state: RequestState,
        sink: AnswerListener,
        *,
        timeout: float | None = None,
        bounded: bool = True,
    ) -> Ticket:
        """Queues a request. Raises ``KVTooLargeError`` if it could never run, ``QueueFullError``
        if the queue is ``bounded`` and full, ``ShuttingDownError`` while draining."""
        state.batched = True
        request = state.request
        rows = self._runtime.rows_for(request, batched=True)
        needed = rows * self._forward.shape.row_bytes
        if needed > self.max_kv_bytes:
            raise KVTooLargeError(rows, needed, self.max_kv_bytes)
        now = time.monotonic()
        ticket = Ticket(
            request.token_ids,
            self._runtime.root(request.salt),
            request.mode,
            arrived=now,
            deadline=None if timeout is None else now + timeout,
            state=state,
            sink=sink,
        )
        with self._changed:
            if self._draining or self._closed:
                raise ShuttingDownError("no new requests are taken: the engine is being closed")
            try:
                self._scheduler.add(ticket, bounded=bounded)
            except KVBoostError:
                self._counts["rejected"] += 1
                raise
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="kvboost-loop", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return ticket

    def answer_all(self, states: Sequence[RequestState]) -> list[GenerationResult]:
        """The answers to several requests, however long the queue is. The first failure is raised
        once all have ended; whoever interrupts it ends them."""
        waiting = [FutureAnswer(state) for state in states]
        tickets: list[Ticket] = []
        try:
            for state, one in zip(states, waiting, strict=True):
                tickets.append(self.submit(state, one, bounded=False))
            wait([one.done for one in waiting])
        except BaseException:
            for ticket in tickets:
                self.cancel(ticket)
            raise
        return [one.done.result() for one in waiting]

    def cancel(self, ticket: Ticket) -> None:
        """Ends a request within one step; what it has read is kept."""
        with self._changed:
            ticket.cancelled = True
            self._changed.notify_all()

    def stats(self) -> dict[str, Any]:
        held, spared = self._runtime.running.nbytes()
        with self._changed:
            return {
                "waiting": len(self._scheduler.waiting),
                "running": len(self._scheduler.running),
                "max_waiting": self._config.max_waiting,
                "max_running": self._config.max_running,
                "kv_bytes": held,
                "max_kv_bytes": self.max_kv_bytes,
                "shared_kv_bytes": spared,
                "steps": self._counts["steps"],
                "rows": self._counts["rows"],
                "batch_sizes": dict(self._batch_sizes),
                "finished": dict(self._finished),
                "rejected": self._counts["rejected"],
            }

    def drain(self, timeout: float | None = None) -> bool:
        """Takes no new requests and waits until all are answered; False if time ran out first."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(self._is_idle, timeout)

    def close(self) -> None:
        """Cancels what is running and ends the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _is_idle(self) -> bool:
        return not self._scheduler.waiting and not self._scheduler.running

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or not self._is_idle())
                if self._closed:
                    break
            try:
                self._turn()
            except BaseException as error:  # ours to mend; nobody shall wait for ever meanwhile
                for job in self._everyone():
                    self._end(job, error)
        for job in self._everyone():
            self._leave(job, "cancelled")

    def _turn(self) -> None:
        self._let_go()
        for job in self._running():
            if job.need is None:  # it has taken a breath, perhaps to keep what others wait for
                self._advance(job, None)
        self._start()
        now = time.monotonic()
        with self._changed:
            needs = self._needs()
            batch = self._scheduler.pick(needs, now)
        if len(needs) > 1:
            for job in needs:
                job.state.accompanied = True
        together = [job for job in batch if not job.runs_alone]
        for some in (together, *([job] for job in batch if job.runs_alone)):
            if some:
                self._run(some)

    def _needs(self) -> dict[Ticket, int]:
        return {job: len(job.need) for job in self._running() if job.need is not None}

    def _let_go(self) -> None:
        """Ends requests whose callers have left or whose time is over."""
        now = time.monotonic()
        with self._changed:
            late = set(self._scheduler.expired(now))
            leaving = [job for job in self._everyone() if job.cancelled or job in late]
        for job in leaving:
            self._leave(job, "cancelled" if job.cancelled else "timeout")

    def _start(self) -> None:
        """Starts whom there is room for, until there is enough to read: who comes next would only
        keep the first waiting."""
        while True:
            with self._changed:
                job = self._scheduler.start(time.monotonic(), self._fits, self._needs())
            if job is None:
                return
            job.state.clock.lap("queue")
            job.steps = self._steps(job)
            self._advance(job, None)

    def _steps(self, job: Ticket) -> Steps:
        return self._watch(job.state, Generation(self._runtime, job.state).steps())

    def _fits(self, job: Ticket) -> bool:
        if len(self._running()) == 0:
            return True
        live, pool = self._runtime.running, self._runtime.pool
        rows = self._runtime.rows_for(job.state.request, batched=True)
        shared = 0
        if job.mode is GenerationMode.PREFIX_CACHE:  # others may turn out to reuse moved text
            shared = live.num_shared(job.state.request, job.root)
        return live.nbytes()[0] + pool.bytes_for(rows - shared) <= self.max_kv_bytes

    def _run(self, batch: list[Ticket]) -> None:
        """One forward for everyone in ``batch``; if it fails, one for each."""
        segments = [job.need for job in batch if job.need is not None]
        self._counts["steps"] += 1
        self._counts["rows"] += sum(map(len, segments))
        self._batch_sizes[len(batch)] += 1
        try:
            logits = self._forward(segments)
        except Exception as error:
            if len(batch) == 1:
                self._throw(batch[0], error)
            else:
                for job in batch:
                    self._run_alone(job)
            return
        parts = torch.split(logits, [segment.num_logits for segment in segments])
        for job, part in zip(batch, parts, strict=True):
            self._advance(job, part)

    def _run_alone(self, job: Ticket) -> None:
        """Runs the rows of one whose batch failed. A hook may have changed other rows on the way,
        which cannot be done twice: such a request, which is still being read, begins again."""
        assert job.need is not None and job.steps is not None
        if job.need.hook is not None:
            job.steps.close()
            job.steps, job.need, job.runs_alone = self._steps(job), None, True
            return
        try:
            logits = self._forward([job.need])
        except Exception as error:
            self._throw(job, error)
            return
        self._advance(job, logits)

    def _advance(self, job: Ticket, logits: torch.Tensor | None) -> None:
        """Sends a request its logits and asks what it needs next."""
        assert job.steps is not None
        someone_answers = any(not other.is_reading for other in self._running())
        job.state.slice_rows = self._scheduler.slice_rows(someone_answers)
        try:
            job.need = job.steps.send(logits)
        except StopIteration:
            self._end(job, None)
            return
        except BaseException as error:
            self._end(job, error)
            return
        job.is_reading = not job.state.token_ids
        job.rows_done = job.state.rows
        if not job.to_read and job.state.reuse.spans:
            computed = (span for span in job.state.reuse.spans if span.kind is SpanKind.COMPUTE)
            job.to_read = tuple(range(span.start, span.end) for span in computed)
        self._show(job)

    def _throw(self, job: Ticket, error: BaseException) -> None:
        """Tells a request that its rows could not be computed."""
        assert job.steps is not None
        try:
            job.steps.throw(error)
        except BaseException as same:
            self._end(job, same)

    def _leave(self, job: Ticket, reason: str) -> None:
        """Ends a request before it is done, unless it just was."""
        if job.state.finish_reason == "cancelled":
            job.state.finish_reason = reason
        job.state.closing = True
        error: BaseException | None = None
        if job.steps is None:
            job.state.clock.lap("queue")
        else:
            try:
                job.steps.close()
            except BaseException as failure:
                error = failure
        self._end(job, error)

    def _end(self, job: Ticket, error: BaseException | None) -> None:
        job.need = job.steps = None
        with self._changed:
            self._scheduler.remove(job, time.monotonic())
            self._finished["error" if error is not None else job.state.finish_reason] += 1
            self._changed.notify_all()
        self._show(job)
        job.sink.end(error)

    def _show(self, job: Ticket) -> None:
        if len(job.state.text) > job.shown:
            pieces = job.state.text[job.shown :]
            job.shown += len(pieces)
            job.sink.push(pieces)

    def _running(self) -> list[Ticket]:
        return list(self._scheduler.running)

    def _everyone(self) -> list[Ticket]:
        return [*self._scheduler.waiting, *self._scheduler.running]


def _kv_budget(config: EngineConfig, device: torch.device) -> int:
    if config.max_kv_bytes is not None:
        return config.max_kv_bytes
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 2 * MEMORY_SHARE)
    return int(memory_bytes() * MEMORY_SHARE) or 4 * 1024**3
