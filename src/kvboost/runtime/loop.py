"""Many requests through one model: every step packs the rows they need into one forward.

One thread runs the loop, from the first request on. A step removes the requests that have left,
resumes those that paused, starts waiting ones, picks rows, runs them and hands out the logits.
Once no request has come for a while, it heals conversations. On a CPU, a forward that takes long
lets the requests that are answering run their own steps between two of its layers, so that they
keep their pace whatever else is read.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from kvboost.config import EngineConfig
from kvboost.errors import KVBoostError, ShuttingDownError
from kvboost.results import GenerationResult
from kvboost.runtime.computing import Results, Steps, next_need
from kvboost.runtime.generation import Generation
from kvboost.runtime.healing import Healer, IdleTime
from kvboost.runtime.request import RequestState
from kvboost.runtime.runtime import Runtime
from kvboost.runtime.scheduler import Company, Job, Patience, Scheduler
from kvboost.runtime.streams import AnswerListener, AsyncTextStream, FutureAnswer, Outbox

T = TypeVar("T")

LOOKED_UP_EARLY = 4
"""Waiting requests that are looked up before their turn. Those after them would wait too long for
what was found to hold."""


@dataclass(frozen=True)
class LoopStats:
    """The loop at one moment, and its totals."""

    waiting: int
    running: int
    max_waiting: int
    max_running: int
    kv_bytes: int
    max_kv_bytes: int
    shared_kv_bytes: int
    """What the running requests would need in addition if they shared no rows."""
    steps: int
    steps_between_parts: int
    """Those of running answers between two parts of another forward."""
    rows: int
    batch_sizes: dict[int, int]
    finished: dict[str, int]
    rejected: int
    cpu_seconds: float
    """Processor time of the loop's thread until the end of its last step."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Loop:
    """Thread-safe."""

    def __init__(self, runtime: Runtime, config: EngineConfig, healer: Healer) -> None:
        self._runtime = runtime
        self._backend = backend = runtime.backend
        self._idle_time = IdleTime(backend, healer, runtime.idle_work)
        self._config = config
        self._scheduler = Scheduler(config, backend.step_rows)
        self.max_kv_bytes = runtime.max_kv_bytes
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._draining = self._closed = self._is_meanwhile = False
        self._cpu_seconds = 0.0
        self._counts: Counter[str] = Counter()
        self._batch_sizes: Counter[int] = Counter()
        self._finished: Counter[str] = Counter()
        self._errands: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._outbox = Outbox()
        self._step_clock = backend.device.clock
        self._step_ended: float | None = None
        """When the last step did, if the next one follows at once: what requests do between two of
        them takes time as well, unless steps on a device run meanwhile."""
        self._patience = Patience(config.max_pause, runtime.cost)
        self._num_meanwhile = 0
        """How many steps were run between the parts of other forwards."""
        self._in_forward: frozenset[Job] = frozenset()
        """The requests of the forwards that run."""
        pauses = backend.device.is_host and backend.ends_forwards
        self._pauses_forwards = pauses and bool(self._patience)
        if self._pauses_forwards:
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
        self._runtime.check_size(state.request)
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
                self._counts["rejected"] += 1
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

    def answer_all(self, states: Sequence[RequestState]) -> list[GenerationResult]:
        """The answers to several requests, however long the queue is. Raises the first failure
        once all have ended. An interrupt cancels them all."""
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

    def stats(self) -> LoopStats:
        held, spared = self._runtime.running.nbytes()
        with self._changed:
            return LoopStats(
                waiting=len(self._scheduler.waiting),
                running=len(self._scheduler.running),
                max_waiting=self._config.max_waiting,
                max_running=self._config.max_running,
                kv_bytes=held,
                max_kv_bytes=self.max_kv_bytes,
                shared_kv_bytes=spared,
                steps=self._counts["steps"],
                steps_between_parts=self._num_meanwhile,
                rows=self._counts["rows"],
                batch_sizes=dict(self._batch_sizes),
                finished=dict(self._finished),
                rejected=self._counts["rejected"],
                cpu_seconds=self._cpu_seconds,
            )

    def drain(self, timeout: float | None = None) -> bool:
        """Takes no new requests and waits until all are answered; False if time ran out first."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(self._is_idle, timeout)

    def is_busy(self) -> bool:
        """Whether there are requests."""
        return not self._is_idle()

    def wait_idle(self, timeout: float | None = None) -> bool:
        """Waits until there are no requests; False if time ran out first."""
        with self._changed:
            return self._changed.wait_for(self._is_idle, timeout)

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
                if not self._is_idle():
                    self._step()
                elif self._idle_time.has_work and not self._errands:
                    self._idle_time.use(self._must_not_heal)
            except BaseException as error:  # a defect of ours; no caller may wait for ever
                for job in self._jobs():
                    self._finish(job, error)
            self._cpu_seconds = time.thread_time()
        for job in self._jobs():
            self._cancel(job, "cancelled")
        with self._changed:
            for errand, _ in self._errands:
                errand.cancel()

    def _await_work(self) -> None:
        """Waits for a request, for time to heal something, or to be closed."""
        with self._changed:
            while not (self._is_wanted() or self._idle_time.has_work):
                self._step_ended = None
                self._changed.wait(self._idle_time.look_again)

    def _is_wanted(self) -> bool:
        return self._closed or bool(self._errands) or not self._is_idle()

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

    def _step(self) -> None:
        self._remove_departed()
        self._resume_paused()
        self._start_waiting()
        self._outbox.send()
        probes = [job for job in self._running() if job.is_probing]
        self._run_all(self._needs())
        repairs = {job for job in probes if not job.is_probing}  # a repair follows its probe
        if repairs:
            self._run_all({job: rows for job, rows in self._needs().items() if job in repairs})
        self._idle_time.broken()

    def _run_all(self, needs: dict[Job, int]) -> None:
        for batch in self._pick_batches(needs):
            self._run(batch)
            self._outbox.send()

    def _remove_departed(self, jobs: Sequence[Job] | None = None) -> None:
        """Ends those of ``jobs``, or of all requests, that were cancelled or have timed out."""
        now = time.monotonic()
        with self._changed:
            late = set(self._scheduler.expired(now))
            jobs = self._jobs() if jobs is None else jobs
            departed = [job for job in jobs if job.cancelled or job in late]
        for job in departed:
            self._cancel(job, "cancelled" if job.cancelled else "timeout")

    def _resume_paused(self) -> None:
        """Asks the requests that paused, perhaps to admit rows, what they need next. Those that
        wait for the device are left until it is done, as long as there are others."""
        running = self._running()
        ready = [job for job in running if not job.awaits_device]
        resumed = ready or ([] if self._scheduler.waiting else running)
        paused = [job for job in resumed if job.need is None and job.steps is not None]
        company = self._company() if paused else None
        for job in paused:
            self._advance(job, None, company)

    def _start_waiting(self) -> None:
        """Starts waiting requests that fit, until the next step is full."""
        if not self._scheduler.waiting:
            return
        needs, company = self._needs(), self._company()
        while True:
            with self._changed:
                job = self._scheduler.start(time.monotonic(), self._fits, needs)
            if job is None:
                return
            job.state.clock.lap("queue")
            job.steps = self._steps(job)
            self._advance(job, None, company)
            if job.need is not None:
                needs[job] = len(job.need)

    def answer_meanwhile(self) -> None:
        """Runs the next step of the requests that are answering, if they would otherwise wait too
        long. For work in the loop's thread that takes long: forwards call it before each of their
        parts."""
        if self._is_meanwhile or threading.current_thread() is not self._thread:
            return
        if not (self._patience and self._patience.is_over()):
            return
        self._is_meanwhile = True
        try:
            self._remove_departed(self._answering())
            for job in self._answering():
                if job.need is None:
                    self._advance(job, None)
            self._step_ended = None
            if batch := self._answering():
                self._num_meanwhile += 1
                self._run(batch)
            self._outbox.send()
        finally:
            self._step_ended = None
            self._is_meanwhile = False

    def _answering(self) -> list[Job]:
        """The requests that are answering and are not in the forward that runs."""
        jobs = (job for job in self._running() if job not in self._in_forward)
        return [job for job in jobs if not job.is_reading and job.steps is not None]

    def _pick_batches(self, needs: dict[Job, int]) -> list[list[Job]]:
        """The requests of this step, among those that need so many rows: one batch, and one more
        for each that must run alone. Where forwards let others run between their layers, those that
        are answering have a batch of their own if all together would take long."""
        with self._changed:
            picked = self._scheduler.pick(needs, time.monotonic())
        if len(needs) > 1:
            for job in needs:
                job.state.accompanied = True
        together = [job for job in picked if not job.runs_alone]
        alone = [[job] for job in picked if job.runs_alone]
        batches = [together]
        if self._pauses_forwards and not self._is_quick(together):
            answering = [job for job in together if not job.is_reading]
            batches = [answering, [job for job in together if job.is_reading]]
        return [*filter(None, batches), *alone]

    def _is_quick(self, batch: list[Job]) -> bool:
        """Whether one forward for ``batch`` may be made although some of it are answering and
        others are read."""
        segments = [job.need for job in batch if job.need is not None]
        if len({job.is_reading for job in batch}) < 2:
            return True
        num_rows = sum(map(len, segments))
        keys = sum(len(segment) * segment.end for segment in segments) // num_rows
        return self._patience.allows(num_rows, keys)

    def _run(self, batch: list[Job]) -> None:
        """Makes one forward for the whole ``batch``; if it fails, one for each request. Requests
        that have ended or paused since they were picked are left out."""
        batch = [job for job in batch if job.need is not None]
        if not batch:
            return
        outside, self._in_forward = self._in_forward, self._in_forward.union(batch)
        try:
            self._compute(batch)
        finally:
            self._in_forward = outside

    def _compute(self, batch: list[Job]) -> None:
        segments = [job.need for job in batch if job.need is not None]
        num_rows = sum(map(len, segments))
        started, num_meanwhile = time.perf_counter(), self._num_meanwhile
        has_answers = any(not job.is_reading for job in batch)
        self._counts["steps"] += 1
        self._counts["rows"] += num_rows
        self._batch_sizes[len(batch)] += 1
        began = self._step_clock() if self._step_ended is None else self._step_ended
        try:
            results = self._backend.forward.run(segments)
        except Exception as error:
            if len(batch) == 1:
                self._throw(batch[0], error)
            else:
                for job in batch:
                    self._run_alone(job)
            return
        self._step_ended = self._step_clock()
        seconds, drafted = self._step_ended - began, num_rows > len(batch)
        if len(batch) == 1:  # it knows whether its step was one like others
            batch[0].state.step_seconds = seconds
        elif self._num_meanwhile == num_meanwhile:
            self._runtime.cost.observe_step(num_rows, seconds, drafted=drafted)
        company = self._company()
        for job, result in zip(batch, results, strict=True):
            if result is not None:  # it comes with the next step
                self._advance(job, result, company)
        if has_answers:
            self._patience.answered(started)

    def _run_alone(self, job: Job) -> None:
        """Runs the rows of one request whose batch failed. If it has a hook, that may have changed
        other rows before the failure, which must not happen twice: the request starts again."""
        assert job.need is not None and job.steps is not None
        if job.need.hook is not None:
            job.steps.close()
            job.steps, job.need, job.runs_alone = self._steps(job), None, True
            return
        try:
            result = self._backend.forward.run_one(job.need)
        except Exception as error:
            self._throw(job, error)
            return
        self._advance(job, result)

    def _advance(self, job: Job, given: Results | None, company: Company | None = None) -> None:
        """Sends a request its logits, or its next token, and asks what it needs next. ``company``:
        the requests that run, with this one."""
        assert job.steps is not None
        company = self._company() if company is None else company
        state, is_reading = job.state, job.is_reading
        if is_reading:
            state.turn.slice_rows = self._slice_rows(job, company.num_answering > 0)
        state.turn.has_slack = self._scheduler.has_slack(job)
        state.turn.is_awaited = bool(self._scheduler.waiting)
        company.take(job)
        try:
            if is_reading:
                job.need = next_need(self._backend, job.steps, given)
            else:  # a step has no work for several threads, and no time to set their number
                job.need = job.steps.send(given)
        except StopIteration:
            self._finish(job, None)
        except BaseException as error:
            self._finish(job, error)
        else:
            company.add(job)
            self._show(job)

    def _company(self) -> Company:
        return Company(self._running(), shares_forwards=not self._pauses_forwards)

    def _slice_rows(self, job: Job, someone_answers: bool) -> int:
        """How many rows of a prompt may go into one step: as many as take no longer than answers
        may wait, where a forward cannot let them go on between its layers."""
        rows = self._scheduler.slice_rows(someone_answers)
        if not someone_answers or self._pauses_forwards:
            return rows
        return self._patience.slice_rows(rows, len(job.token_ids))

    def _throw(self, job: Job, error: BaseException) -> None:
        """Tells a request that its rows could not be computed."""
        assert job.steps is not None
        try:
            job.steps.throw(error)
        except BaseException as same:
            self._finish(job, same)

    def _cancel(self, job: Job, reason: str) -> None:
        """Ends a request early. A request that has just ended keeps its own finish reason."""
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
        self._finish(job, error)

    def _finish(self, job: Job, error: BaseException | None) -> None:
        """Removes a request and tells its listener."""
        job.need = job.steps = None
        with self._changed:
            self._scheduler.remove(job, time.monotonic())
            self._finished["error" if error is not None else job.state.finish_reason] += 1
            self._changed.notify_all()
        self._show(job)
        self._outbox.end(job.listener, error)
        self._outbox.send()

    def _show(self, job: Job) -> None:
        """Puts what is new of an answer into the outbox."""
        pieces = job.state.shown[job.num_shown :]
        if pieces:
            job.num_shown += len(pieces)
            self._outbox.push(job.listener, pieces)

    def _steps(self, job: Job) -> Steps:
        return Generation(self._runtime, job.state).steps()

    def _fits(self, job: Job) -> bool:
        """Whether the KV of one more request fits the budget. One request alone always runs."""
        return not self._running() or self._runtime.has_room(job.state.request, job.root)

    def _needs(self) -> dict[Job, int]:
        """How many rows each running request needs next."""
        return {job: len(job.need) for job in self._running() if job.need is not None}

    def _is_idle(self) -> bool:
        return not self._scheduler.waiting and not self._scheduler.running

    def _running(self) -> list[Job]:
        return list(self._scheduler.running)

    def _jobs(self) -> list[Job]:
        return [*self._scheduler.waiting, *self._scheduler.running]
