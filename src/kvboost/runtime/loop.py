"""Many requests through one model: every step packs the rows they need into one forward.

One thread runs the loop, from the first request on. Once no request has come for a while, it heals
conversations.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from kvboost.config import EngineConfig
from kvboost.errors import KVBoostError, ShuttingDownError
from kvboost.results import GenerationResult
from kvboost.runtime.healing import Healer, IdleTime
from kvboost.runtime.request import RequestState
from kvboost.runtime.runtime import Runtime
from kvboost.runtime.scheduler import Job, Scheduler
from kvboost.runtime.stepping import Stepper
from kvboost.runtime.streams import AnswerListener, AsyncTextStream, FutureAnswer

T = TypeVar("T")

LOOKED_UP_EARLY = 4
"""Waiting requests that are looked up before their turn. Those after them would wait too long for
what was found to hold."""


class Loop:
    """Thread-safe."""

    def __init__(self, runtime: Runtime, config: EngineConfig, healer: Healer) -> None:
        self._runtime = runtime
        self._idle_time = IdleTime(runtime.backend, healer, runtime.idle_work)
        self._config = config
        self._scheduler = Scheduler(config, runtime.backend.step_rows)
        self._changed = threading.Condition()
        self._stepper = Stepper(runtime, config, self._scheduler, self._changed)
        self._thread: threading.Thread | None = None
        self._draining = self._closed = False
        self._cpu_seconds = 0.0
        self._num_rejected = 0
        self._errands: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        if self._stepper.pauses_forwards:
            runtime.model.forward.between_parts = self.answer_meanwhile
        runtime.idle_work.on_added = self._wake

    def submit(
        self,
        state: RequestState,
        listener: AnswerListener,
        *,
        timeout: float | None = None,
    ) -> Job:
        """Queues a request. Raises ``KVTooLargeError`` if it could never run, ``QueueFullError``
        if the queue is full, ``ShuttingDownError`` while draining. While others run, the caller's
        thread looks up what is cached of the prompt, and the loop checks that it still holds."""
        self._runtime.check_size(state.request)
        if self._scheduler.running and len(self._scheduler.waiting) < LOOKED_UP_EARLY:
            state.early = self._runtime.planner.look_early(state.request)
        return self._queue(state, listener, timeout)

    def _queue(
        self,
        state: RequestState,
        listener: AnswerListener,
        timeout: float | None = None,
        *,
        bounded: bool = True,
    ) -> Job:
        state.batched = True
        now = time.monotonic()
        job = Job(
            state,
            self._runtime.root_of(state.request),
            listener,
            arrived=now,
            deadline=None if timeout is None else now + timeout,
        )
        with self._changed:
            if self._draining or self._closed:
                raise ShuttingDownError("no new requests are taken: the engine is being closed")
            try:
                self._scheduler.add(job, bounded=bounded)
            except KVBoostError:
                self._num_rejected += 1
                raise
            self._start_thread()
            self._changed.notify_all()
        return job

    def stream(self, state: RequestState, timeout: float | None = None) -> AsyncTextStream:
        """Queues a request; its answer can be read in this event loop."""
        stream = AsyncTextStream(state)
        job = self.submit(state, stream, timeout=timeout)
        stream.on_close(self.canceller(job))
        return stream

    def _start_thread(self) -> None:
        """Call it with the lock held."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="kvboost-loop", daemon=True)
            self._thread.start()
            # A process may end without closing its engine. A thread that is killed within torch
            # would end it with an abort.
            atexit.register(self.close)

    def between_steps(self, work: Callable[[], T]) -> Future[T]:
        """Runs ``work``, which needs the model for a moment, in the loop's thread: one such piece
        before each step, so that answers wait for no more than one."""
        errand: Future[T] = Future()
        with self._changed:
            if self._closed:
                raise ShuttingDownError("the engine is closed")
            self._errands.append((errand, work))
            self._start_thread()
            self._changed.notify_all()
        return errand

    def answer_meanwhile(self) -> None:
        """Runs the next step of the requests that are answering, if they would otherwise wait too
        long. For work in the loop's thread that takes long: forwards call it before each of their
        parts."""
        if threading.current_thread() is self._thread:
            self._stepper.answer_meanwhile()

    def answer_all(self, states: Sequence[RequestState]) -> list[GenerationResult]:
        """The answers to several requests, however long the queue is. Raises the first failure
        once all have ended. An interrupt cancels them all."""
        for state in states:
            self._runtime.check_size(state.request)
        answers = [FutureAnswer(state) for state in states]
        jobs: list[Job] = []
        try:
            with self._changed:  # the loop sees all of them at once, so the schedule is the same
                for state, answer in zip(states, answers, strict=True):
                    jobs.append(self._queue(state, answer, bounded=False))
            wait([answer.done for answer in answers])
        except BaseException:
            for job in jobs:
                self.cancel(job)
            raise
        return [answer.done.result() for answer in answers]

    def cancel(self, job: Job) -> None:
        """Ends a request within one step; what it has read is kept."""
        with self._changed:
            job.cancelled = True
            self._changed.notify_all()

    def canceller(self, job: Job) -> Callable[[], None]:
        """Cancels the request, if it has not ended. What its listener holds: it does not keep the
        request alive, which holds the listener, so both are freed without the garbage collector."""
        found = weakref.ref(job)

        def cancel() -> None:
            if (there := found()) is not None:
                self.cancel(there)

        return cancel

    def stats(self) -> dict[str, Any]:
        """The loop at this moment, and its totals. ``shared_kv_bytes``: what the running requests
        would need in addition if they shared no rows; ``steps_between_parts``: those of running
        answers between two parts of another forward; ``cpu_seconds``: the processor time of the
        loop's thread until the end of its last step."""
        held, spared = self._runtime.running.nbytes()
        stepper, scheduler = self._stepper, self._scheduler
        with self._changed:
            return {
                "waiting": len(scheduler.waiting),
                "running": len(scheduler.running),
                "max_waiting": self._config.max_waiting,
                "max_running": self._config.max_running,
                "kv_bytes": held,
                "max_kv_bytes": self._runtime.max_kv_bytes,
                "shared_kv_bytes": spared,
                "steps": stepper.counts["steps"],
                "steps_between_parts": stepper.num_meanwhile,
                "rows": stepper.counts["rows"],
                "batch_sizes": dict(stepper.batch_sizes),
                "finished": dict(stepper.finished),
                "rejected": self._num_rejected,
                "cpu_seconds": self._cpu_seconds,
            }

    def drain(self, timeout: float | None = None) -> bool:
        """Takes no new requests and waits until all are answered; False if time ran out first."""
        with self._changed:
            self._draining = True
        return self.wait_idle(timeout)

    def is_busy(self) -> bool:
        """Whether there are requests."""
        return not self._scheduler.is_idle

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Waits until there are no requests; False if time ran out first."""
        with self._changed:
            return self._changed.wait_for(lambda: self._scheduler.is_idle, timeout)

    def close(self) -> None:
        """Cancels all requests and ends the thread."""
        atexit.unregister(self.close)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while True:
            self._await_work()
            if self._closed:
                break
            try:
                self._run_errand()
                if self.is_busy():
                    self._stepper.step()
                    self._idle_time.broken()
                elif self._idle_time.has_work and not self._errands:
                    self._idle_time.use(self._must_not_heal)
            except BaseException as error:  # a defect of ours; no caller may wait for ever
                self._stepper.fail_all(error)
            self._cpu_seconds = time.thread_time()
        self._stepper.cancel_all()
        with self._changed:
            for errand, _ in self._errands:
                errand.cancel()

    def _await_work(self) -> None:
        """Waits for a request, for time to heal something, or to be closed."""
        with self._changed:
            while not (self._is_wanted() or self._idle_time.has_work):
                self._stepper.rest()
                self._changed.wait(self._idle_time.look_again)

    def _is_wanted(self) -> bool:
        return self._closed or bool(self._errands) or self.is_busy()

    def _must_not_heal(self) -> bool:
        """Whether a request needs the model, here or outside the loop."""
        return self._is_wanted() or self._runtime.idle_work.is_held

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _run_errand(self) -> None:
        with self._changed:
            if not self._errands:
                return
            errand, work = self._errands.popleft()
        if errand.set_running_or_notify_cancel():
            try:
                errand.set_result(work())
            except BaseException as error:
                errand.set_exception(error)
