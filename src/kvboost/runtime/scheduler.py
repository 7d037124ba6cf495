"""Who runs next: a queue, and the rows of the next step. Knows tokens and numbers, no tensors.

    waiting ──► reading ──► answering ──► done
            start           first token

Requests start in a fair order, when their KV fits. One that shares unread text with a request that
is being read waits for it, up to ``sharing_wait`` seconds: the text is then read once. A step takes
the next row of everyone who is answering, and as much of the prompts as lets them keep their pace.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

import numpy as np

from kvboost.config import EngineConfig, GenerationMode
from kvboost.errors import QueueFullError
from kvboost.tokens.hashing import ChunkKey, TokenIds, common_prefix, window_hashes

WINDOW = 32
SAMPLED = 16
"""Of the windows of a text one in so many is compared with those of others."""
LEAST_SHARED = 128
"""Nobody waits for fewer tokens."""
PATIENCE_SECONDS = 5.0
"""A prompt that has been read for so long goes before shorter ones."""


@dataclass(eq=False)
class Job:
    """One request as the scheduler sees it."""

    token_ids: TokenIds
    root: ChunkKey
    """Of the cache it uses: nobody else's is shared."""
    mode: GenerationMode = GenerationMode.CHUNK_KV_REUSE
    arrived: float = 0.0
    deadline: float | None = None
    started: float | None = None
    to_read: tuple[range, ...] = ()
    """Rows of its prompt that must be computed, once it has started and that is known."""
    rows_done: int = 0
    """All rows before this one are in place."""
    is_reading: bool = True
    held_since: float | None = None

    @property
    def rows_left(self) -> int:
        """Rows of its prompt that are still to be computed."""
        return sum(max(0, rows.stop - max(rows.start, self.rows_done)) for rows in self.to_read)

    @cached_property
    def windows(self) -> dict[int, int]:
        """Some of the windows of its prompt, the same ones in every text, and where they stand."""
        hashes = window_hashes(self.root, self.token_ids, WINDOW)
        places = np.flatnonzero(hashes % np.uint64(SAMPLED) == 0)
        return dict(zip(hashes[places].tolist(), places.tolist(), strict=True))


JobT = TypeVar("JobT", bound=Job)


@dataclass
class Scheduler(Generic[JobT]):
    """Not thread-safe: its owner holds a lock. ``waiting`` is in order of arrival, ``running`` in
    order of start."""

    config: EngineConfig
    step_rows: int
    """Rows of prompts in one step, while others are answering."""
    waiting: list[JobT] = field(default_factory=list)
    running: list[JobT] = field(default_factory=list)
    _finished_at: float | None = None
    _seconds_each: float = 1.0

    def add(self, job: JobT, *, bounded: bool = True) -> None:
        """Takes a job into the queue; raises ``QueueFullError`` if that is ``bounded`` and full.
        Those who will start at once do not count."""
        free = max(0, self.config.max_running - len(self.running))
        if bounded and len(self.waiting) >= self.config.max_waiting + free:
            raise QueueFullError(len(self.waiting), self.retry_after())
        self.waiting.append(job)

    def remove(self, job: JobT, now: float) -> None:
        """The job is over, whether it ran or not."""
        if job in self.waiting:
            self.waiting.remove(job)
            return
        self.running.remove(job)
        if self._finished_at is not None:
            self._seconds_each += 0.1 * (now - self._finished_at - self._seconds_each)
        self._finished_at = now

    def retry_after(self) -> int:
        """In how many seconds the queue should have room, by how fast requests have finished."""
        return int(min(60, max(1, len(self.waiting) * self._seconds_each / 2)))

    def start(
        self,
        now: float,
        fits: Callable[[JobT], bool],
        rows: Mapping[JobT, int] | None = None,
    ) -> JobT | None:
        """The next job to start, now running; None if there is none, or no room for it. ``rows``:
        how many those that run need next, if that shall matter. It must be asked again once
        ``to_read`` of that job is known: others may have to wait for it."""
        if len(self.running) >= self.config.max_running:
            return None
        ready = [
            job
            for job in self.waiting
            if not self._is_held(job, now) and not self._keeps_waiting(job, rows, now)
        ]
        if not ready:
            return None
        # Whoever has least running goes first; among those, whoever came first.
        busy = Counter(job.root for job in self.running)
        job = min(ready, key=lambda one: busy[one.root])
        if not fits(job):
            return None  # smaller ones do not overtake it: it would wait for ever
        self.waiting.remove(job)
        self.running.append(job)
        job.started = now
        return job

    def pick(self, rows: Mapping[JobT, int], now: float) -> list[JobT]:
        """Whose rows go through the model next, of jobs that need this many. Everyone's who is
        answering; of the prompts, those with the fewest rows left, until the step is full."""
        answering = [job for job in self.running if job in rows and not job.is_reading]
        reading = [job for job in self.running if job in rows and job.is_reading]
        reading.sort(key=lambda job: self._turn(job, now))
        most = self.slice_rows(bool(answering))
        chosen, taken = [], 0
        for job in reading:
            if taken and taken + rows[job] > most:
                break
            chosen.append(job)
            taken += rows[job]
        return answering + chosen

    def slice_rows(self, someone_answers: bool) -> int:
        """How many rows of prompts go into one step."""
        return self.step_rows if someone_answers else 4 * self.step_rows

    def expired(self, now: float) -> list[JobT]:
        everyone = (*self.waiting, *self.running)
        return [job for job in everyone if job.deadline is not None and now >= job.deadline]

    def _turn(self, job: Job, now: float) -> tuple[bool, float]:
        """The shortest goes first; before them those who have waited for long, in order."""
        assert job.started is not None
        is_patient = now - job.started <= PATIENCE_SECONDS
        return is_patient, job.rows_left if is_patient else job.started

    def _keeps_waiting(self, job: Job, rows: Mapping[JobT, int] | None, now: float) -> bool:
        """Whether those who go before ``job`` fill the next step: to put it in place now would
        only keep them waiting. Nobody is kept for long, and not by one with more to read."""
        if rows is None or now - job.arrived > PATIENCE_SECONDS:
            return False
        reading = [other for other in self.running if other.is_reading]
        if any(other not in rows for other in reading):
            return True  # it is being put in place, which takes a moment
        first = (other for other in reading if self._turn(other, now) <= (True, len(job.token_ids)))
        answers = len(reading) < len(self.running)
        return sum(rows[other] for other in first) >= self.slice_rows(answers)

    def _is_held(self, job: Job, now: float) -> bool:
        """Whether a job should wait for another to read what both need."""
        if not self.config.sharing_wait or job.mode is GenerationMode.BASELINE:
            return False
        if job.held_since is not None and now - job.held_since >= self.config.sharing_wait:
            return False
        if not any(self._awaits(job, other) for other in self.running):
            return False
        if job.held_since is None:
            job.held_since = now
        return True

    def _awaits(self, job: Job, other: Job) -> bool:
        if not other.is_reading or other.root != job.root:
            return False
        if other.mode is GenerationMode.BASELINE:
            return False
        return num_shared(job, other) >= LEAST_SHARED


def num_shared(job: Job, other: Job) -> int:
    """About how many of the tokens that ``other`` still has to read are in ``job`` too, where
    they would serve it: in its beginning, or with moved reuse anywhere."""
    common = common_prefix(job.token_ids, other.token_ids)
    to_read = other.to_read or (range(len(other.token_ids)),)  # not known yet: all of it
    left = [range(max(rows.start, other.rows_done), rows.stop) for rows in to_read]
    prefix = sum(max(0, min(common, rows.stop) - rows.start) for rows in left)
    if job.mode is not GenerationMode.CHUNK_KV_REUSE or prefix >= LEAST_SHARED:
        return prefix
    elsewhere = (place for hash, place in other.windows.items() if hash in job.windows)
    return prefix + SAMPLED * _num_within((place for place in elsewhere if place >= common), left)


def _num_within(places: Iterable[int], ranges: Sequence[range]) -> int:
    return sum(any(place in rows for rows in ranges) for place in places)
