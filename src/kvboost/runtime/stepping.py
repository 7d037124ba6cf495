"""The steps of a loop: what runs next, made into forwards, and their results handed out.

A step removes the requests that have left, resumes those that paused, starts waiting ones, picks
rows, runs them and hands out the logits. On a CPU, a forward that takes long lets the requests that
are answering run their own steps between two of its layers, so that they keep their pace whatever
else is read.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence

from kvboost.config import EngineConfig
from kvboost.runtime.computing import Results, Steps, next_need
from kvboost.runtime.generation import Generation
from kvboost.runtime.runtime import Runtime
from kvboost.runtime.scheduler import Company, Job, Patience, Scheduler
from kvboost.runtime.streams import Outbox


class Stepper:
    """Runs the requests of a scheduler, step by step. Use it within one thread."""

    def __init__(
        self,
        runtime: Runtime,
        config: EngineConfig,
        scheduler: Scheduler,
        changed: threading.Condition,
    ) -> None:
        """``changed`` is the lock of ``scheduler``, to which other threads add requests. It is
        notified when one ends."""
        self._runtime = runtime
        self._backend = backend = runtime.backend
        self._scheduler = scheduler
        self._changed = changed
        self._is_meanwhile = False
        self.counts: Counter[str] = Counter()
        self.batch_sizes: Counter[int] = Counter()
        self.finished: Counter[str] = Counter()
        self.num_meanwhile = 0
        """How many steps were run between the parts of other forwards."""
        self._outbox = Outbox()
        self._step_clock = backend.device.clock
        self._step_ended: float | None = None
        """When the last step did, if the next one follows at once: what requests do between two of
        them takes time as well, unless steps on a device run meanwhile."""
        self._patience = Patience(config.max_pause, runtime.cost)
        self._in_forward: frozenset[Job] = frozenset()
        """The requests of the forwards that run."""
        self.pauses_forwards = (
            backend.device.is_host and backend.ends_forwards and bool(self._patience)
        )
        """Whether forwards let answers go on between their parts."""

    def step(self) -> None:
        """One step of the requests that run, and of those that can start."""
        self._remove_departed()
        self._resume_paused()
        self._start_waiting()
        self._outbox.send()
        probes = [job for job in self._running() if job.is_probing]
        taken = self._run_all(self._needs())
        repairs = {job for job in probes if not job.is_probing}
        if repairs:  # those that the step has room for follow their probes at once
            needs = {job: rows for job, rows in self._needs().items() if job in repairs}
            self._run_all(needs, taken)

    def rest(self) -> None:
        """Says that the next step does not follow the last one at once."""
        self._step_ended = None

    def cancel_all(self) -> None:
        """Ends all requests, as if each had been cancelled."""
        for job in self._scheduler.jobs:
            self._cancel(job, "cancelled")

    def fail_all(self, error: BaseException) -> None:
        """Ends all requests with an error."""
        for job in self._scheduler.jobs:
            self._finish(job, error)

    def answer_meanwhile(self) -> None:
        """Runs the next step of the requests that are answering, if they would otherwise wait too
        long."""
        if self._is_meanwhile or not (self._patience and self._patience.is_over()):
            return
        self._is_meanwhile = True
        try:
            self._remove_departed(self._answering())
            for job in self._answering():
                if job.need is None:
                    self._advance(job, None)
            self._step_ended = None
            if batch := self._answering():
                self.num_meanwhile += 1
                self._run(batch)
            self._outbox.send()
        finally:
            self._step_ended = None
            self._is_meanwhile = False

    def _run_all(self, needs: dict[Job, int], taken: int = 0) -> int:
        """Runs the requests of a step that has ``taken`` rows of prompts; returns how many more it
        takes with these."""
        batches = self._pick_batches(needs, taken)
        more = sum(needs[job] for batch in batches for job in batch if job.is_reading)
        for batch in batches:
            self._run(batch)
            self._outbox.send()
        return more

    def _remove_departed(self, jobs: Sequence[Job] | None = None) -> None:
        """Ends those of ``jobs``, or of all requests, that were cancelled or have timed out."""
        now = time.monotonic()
        with self._changed:
            late = set(self._scheduler.expired(now))
            jobs = self._scheduler.jobs if jobs is None else jobs
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

    def _answering(self) -> list[Job]:
        """The requests that are answering and are not in the forward that runs."""
        jobs = (job for job in self._running() if job not in self._in_forward)
        return [job for job in jobs if not job.is_reading and job.steps is not None]

    def _pick_batches(self, needs: dict[Job, int], taken: int) -> list[list[Job]]:
        """The requests of this step, among those that need so many rows: one batch, and one more
        for each that must run alone. ``taken``: rows of prompts that the step has run. Where
        forwards let others run between their layers, those that are answering have a batch of their
        own if all together would take long."""
        with self._changed:
            picked = self._scheduler.pick(needs, time.monotonic(), taken)
        if len(needs) > 1:
            for job in needs:
                job.state.accompanied = True
        together = [job for job in picked if not job.runs_alone]
        alone = [[job] for job in picked if job.runs_alone]
        batches = [together]
        if self.pauses_forwards and not self._is_quick(together):
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
        started, num_meanwhile = time.perf_counter(), self.num_meanwhile
        has_answers = any(not job.is_reading for job in batch)
        self.counts["steps"] += 1
        self.counts["rows"] += num_rows
        self.batch_sizes[len(batch)] += 1
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
        elif self.num_meanwhile == num_meanwhile:
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
        return Company(self._running(), shares_forwards=not self.pauses_forwards)

    def _slice_rows(self, job: Job, someone_answers: bool) -> int:
        """How many rows of a prompt may go into one step: as many as take no longer than answers
        may wait, where a forward cannot let them go on between its layers."""
        rows = self._scheduler.slice_rows(someone_answers)
        if not someone_answers or self.pauses_forwards:
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
            self.finished["error" if error is not None else job.state.finish_reason] += 1
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

    def _running(self) -> list[Job]:
        return list(self._scheduler.running)
