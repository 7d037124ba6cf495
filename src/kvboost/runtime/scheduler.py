"""Which request runs next: a queue, and the rows of the next step. It handles no tensors.

    waiting ──► reading ──► answering ──► done
            start           first token

Tenants take turns, and a request starts when its KV fits. A request that shares unread text with
one that is being read waits for it, up to ``SHARING_WAIT`` seconds, so that the text is read once.
A step takes the next row of every request that is answering, and as many prompt rows as still let
those requests keep their pace.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Protocol
from weakref import WeakKeyDictionary

import numpy as np

from kvboost.config import EngineConfig, GenerationMode
from kvboost.errors import QueueFullError
from kvboost.results import SpanKind
from kvboost.runtime.request import RequestState
from kvboost.runtime.streams import AnswerListener
from kvboost.tokens.hashing import ChunkKey, TokenIds, common_prefix, window_hashes

if TYPE_CHECKING:
    from kvboost.model.execution.segment import Segment
    from kvboost.runtime.computing import Steps


WINDOW = 32
SAMPLED = 16
"""One window in this many is compared with the windows of other prompts."""


@dataclass(eq=False)
class Job:
    """A request that waits or runs."""

    state: RequestState
    root: ChunkKey
    """The root of the cache it uses. Jobs with other roots share nothing with it."""
    listener: AnswerListener
    arrived: float = 0.0
    deadline: float | None = None
    started: float | None = None
    held_since: float | None = None
    """Since when it waits for another job to read text that both need."""
    steps: Steps | None = None
    need: Segment | None = None
    """The rows it needs next; None if it paused or has not started."""
    num_shown: int = 0
    """How many pieces of text, or token ids, its listener has got."""
    cancelled: bool = False
    runs_alone: bool = False
    """Its batch failed, and its rows could not simply be run again with others."""

    @property
    def tenant(self) -> str:
        return self.state.request.tenant

    @property
    def mode(self) -> GenerationMode:
        return self.state.request.mode

    @property
    def token_ids(self) -> TokenIds:
        return self.state.request.token_ids

    @property
    def is_reading(self) -> bool:
        """Whether it has no token of its answer yet."""
        return not self.state.token_ids

    @property
    def is_probing(self) -> bool:
        """Whether its next rows are a probe."""
        return self.need is not None and self.need.until is not None

    @property
    def awaits_device(self) -> bool:
        """Whether it pauses, and the device has not done yet what it needs to go on."""
        return self.state.awaits is not None and not self.state.awaits()

    @property
    def to_read(self) -> list[range]:
        """The rows of its prompt that must be computed; all of them until it has been planned."""
        if not self.state.reuse.spans:
            return [range(len(self.token_ids))]
        spans = self.state.reuse.spans
        return [range(s.start, s.end) for s in spans if s.kind is SpanKind.COMPUTE]

    @property
    def left_to_read(self) -> list[range]:
        """The part of ``to_read`` that is not computed yet."""
        done = self.state.rows
        left = (range(max(rows.start, done), rows.stop) for rows in self.to_read)
        return [rows for rows in left if rows]

    @property
    def rows_left(self) -> int:
        return sum(map(len, self.left_to_read))

    def common_with(self, other: Job) -> tuple[int, list[int]]:
        """How many tokens both prompts begin with, and at which places after them the other one has
        windows of this one."""
        found = self._common.get(other)
        if found is None:
            begin, theirs = common_prefix(self.token_ids, other.token_ids), other.windows
            places = (theirs[hash] for hash in theirs.keys() & self.windows.keys())
            found = self._common[other] = begin, [place for place in places if place >= begin]
        return found

    @cached_property
    def _common(self) -> WeakKeyDictionary[Job, tuple[int, list[int]]]:
        return WeakKeyDictionary()

    @cached_property
    def windows(self) -> dict[int, int]:
        """A sample of its prompt's windows and their positions. The sample depends on content
        alone, so equal texts give equal windows."""
        hashes = window_hashes(self.root, self.token_ids, WINDOW)
        places = np.flatnonzero(hashes % np.uint64(SAMPLED) == 0)
        return dict(zip(hashes[places].tolist(), places.tolist(), strict=True))


SHARING_WAIT = 2.0
"""The most seconds that a request waits for text that another one is reading."""
LEAST_SHARED = 128
"""A request does not wait to share fewer tokens."""
MOST_BESIDE_HEALING = 8
"""While more jobs answer, none is healed: their steps have no time to spare."""
PATIENCE_SECONDS = 5.0
"""A prompt that has been read for longer than this goes before shorter ones."""

Left = Sequence[range]
"""The rows of a prompt that are not computed yet."""


@dataclass
class Scheduler:
    """Not thread-safe: its owner holds a lock. ``waiting`` is in order of arrival, ``running`` in
    order of start."""

    config: EngineConfig
    step_rows: int
    """Prompt rows in one step while other requests are answering."""
    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    _finished_at: float | None = None
    _seconds_each: float = 1.0

    @property
    def jobs(self) -> list[Job]:
        """Those that wait and those that run."""
        return [*self.waiting, *self.running]

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.running

    def add(self, job: Job, *, bounded: bool = True) -> None:
        """Puts a job into the queue. If ``bounded``, raises ``QueueFullError`` when the queue is
        full, or when a named tenant has as many jobs in it as there are places left, or has running
        jobs and there is one place left. So there is always a place for another tenant. Jobs that
        can start at once do not count."""
        starting = max(0, self.config.max_running - len(self.running))
        places = self.config.max_waiting + starting - len(self.waiting)
        if bounded and places <= 0:
            raise QueueFullError(len(self.waiting), self.retry_after())
        if bounded and job.tenant:
            own = sum(other.tenant == job.tenant for other in self.waiting)
            is_last = places == 1 and len(self.waiting) >= starting
            runs = any(other.tenant == job.tenant for other in self.running)
            if own - starting >= places or (is_last and runs):
                raise QueueFullError(own, self.retry_after(), job.tenant)
        self.waiting.append(job)

    def remove(self, job: Job, now: float) -> None:
        """Removes a job that is done, failed or cancelled, whether or not it ran."""
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
        fits: Callable[[Job], bool],
        rows: Mapping[Job, int] | None = None,
    ) -> Job | None:
        """Starts the next job and returns it; None if no job is ready or the next one does not
        fit. ``rows``: how many rows each running job needs next; None starts jobs even if the next
        step is full. Call it again once the returned job has been planned: other jobs may have to
        wait for what it reads."""
        if not self.waiting or len(self.running) >= self.config.max_running:
            return None
        # The tenant with the fewest running jobs goes first; sorting keeps the order of arrival.
        busy = Counter(job.tenant for job in self.running)
        left = {job: job.left_to_read for job in self.running if job.is_reading}
        full_from = math.inf if rows is None else self._full_from(left, rows, now)
        sharing = self._sharing(left)
        ready = (
            job
            for job in sorted(self.waiting, key=lambda job: busy[job.tenant])
            if not self._waits_for_sharing(job, sharing, now)
            and (len(job.token_ids) < full_from or now - job.arrived > PATIENCE_SECONDS)
        )
        job = next(ready, None)
        if job is None or not fits(job):
            return None  # smaller jobs do not overtake it, or it might wait for ever
        self.waiting.remove(job)
        self.running.append(job)
        job.started = now
        return job

    def pick(self, rows: Mapping[Job, int], now: float, taken: int = 0) -> list[Job]:
        """The jobs of the next step, among those that need ``rows``: every job that is answering,
        and the prompts with the fewest rows left until the step is full. ``taken``: prompt rows
        that this step has run already."""
        answering = [job for job in self.running if job in rows and not job.is_reading]
        reading = [job for job in self.running if job in rows and job.is_reading]
        reading.sort(key=lambda job: self._priority(job, now))
        most = self.slice_rows(any(not job.is_reading for job in self.running))
        chosen = []
        for job in reading:
            if taken and taken + rows[job] > most:
                break
            chosen.append(job)
            taken += rows[job]
        return answering + chosen

    def has_slack(self, job: Job) -> bool:
        """Whether the next step of a job may heal some of its rows: those of one job at a time,
        while few answer and no other one reads or waits."""
        if len(self.running) > MOST_BESIDE_HEALING or self.waiting:
            return False
        healing = next((other for other in self.running if other.state.heals), job)
        return healing is job and not any(o.is_reading for o in self.running if o is not job)

    def slice_rows(self, someone_answers: bool) -> int:
        """How many prompt rows go into one step."""
        return self.step_rows if someone_answers else 4 * self.step_rows

    def expired(self, now: float) -> list[Job]:
        """The jobs whose deadline has passed."""
        return [job for job in self.jobs if job.deadline is not None and now >= job.deadline]

    def _priority(self, job: Job, now: float) -> tuple[bool, float]:
        """Sorts prompts: those that were read for too long first, in order of start, then the
        shortest."""
        assert job.started is not None
        is_patient = now - job.started <= PATIENCE_SECONDS
        return is_patient, job.rows_left if is_patient else job.started

    def _full_from(self, left: Mapping[Job, Left], rows: Mapping[Job, int], now: float) -> float:
        """The number of tokens from which on a prompt does not start yet: those that go before it
        fill the next step, and assembling it now would only delay them. It is not kept waiting for
        long, nor by a longer prompt."""
        reading = [job for job in left if job.state.awaits is None]
        if any(job not in rows for job in reading):
            return 0  # it is being assembled, which takes a moment
        most, taken = self.slice_rows(len(left) < len(self.running)), 0
        for is_patient, number, job_rows in sorted(
            (*self._priority(job, now), rows[job]) for job in reading
        ):
            taken += job_rows
            if taken >= most:
                return number if is_patient else 0
        return math.inf

    def _sharing(self, left: Mapping[Job, Left]) -> list[tuple[Job, Left]]:
        """The jobs that still have to read text that may serve others, and that text."""
        return [
            (job, rows)
            for job, rows in left.items()
            if job.mode is not GenerationMode.BASELINE and sum(map(len, rows)) >= LEAST_SHARED
        ]

    def _waits_for_sharing(self, job: Job, sharing: Sequence[tuple[Job, Left]], now: float) -> bool:
        """Whether a job should wait until another one has read the text that both need."""
        if not sharing or job.mode is GenerationMode.BASELINE:
            return False
        if job.held_since is not None and now - job.held_since >= SHARING_WAIT:
            return False
        if not any(
            other.root == job.root and num_shared(job, other, left) >= LEAST_SHARED
            for other, left in sharing
        ):
            return False
        if job.held_since is None:
            job.held_since = now
        return True


def num_shared(job: Job, other: Job, left: Left) -> int:
    """About how many of the tokens that ``other`` still has to read, ``left``, would serve ``job``:
    in its prefix, or with moved reuse anywhere."""
    common, elsewhere = job.common_with(other)
    prefix = sum(max(0, min(common, rows.stop) - rows.start) for rows in left)
    if job.mode is not GenerationMode.CHUNK_KV_REUSE or prefix >= LEAST_SHARED:
        return prefix
    return prefix + SAMPLED * _num_within(elsewhere, left)


def _num_within(places: Sequence[int], ranges: Left) -> int:
    """How many places are in one of the ranges, which do not overlap."""
    return sum(sum(map(rows.__contains__, places)) for rows in ranges)


class Company:
    """The sums of what running requests need and expect. A request is taken out while it is asked
    for its next rows, so that it is told about the others only. Adding all of them up each time
    would take as long as a step if many run."""

    def __init__(self, jobs: Iterable[Job], *, shares_forwards: bool = True) -> None:
        """``shares_forwards``: whether prompts that are read are in one forward with answers."""
        self.num_answering = 0
        self._shares_forwards = shares_forwards
        self._tokens = self._promises = 0.0
        self._rows = 0
        for job in jobs:
            self._count(job, 1)

    def add(self, job: Job) -> None:
        self._count(job, 1)

    def take(self, job: Job) -> None:
        """Takes a request out and tells it of the others."""
        self._count(job, -1)
        turn = job.state.turn
        turn.other_tokens, turn.other_promises = self._tokens, self._promises
        turn.other_rows = self._rows

    def _count(self, job: Job, sign: int) -> None:
        state = job.state
        if state.token_ids:
            self.num_answering += sign
            self._tokens += sign * state.expected_tokens
            self._promises += sign * state.promised_tokens
        elif not self._shares_forwards:
            return
        if job.need is not None:
            self._rows += sign * len(job.need)


LEAST_SLICE = 32
"""Rows of a prompt in one forward, however long they take: fewer would hardly be faster."""
QUICK_ROWS = 16
"""So few rows take about as long as one: they wait for the weights."""


class Costs(Protocol):
    """How long forwards take."""

    def rows_within(self, seconds: float, keys: int) -> int | None: ...


class Patience:
    """Says what may run before answers must go on, so that none waits longer than ``max_pause``
    seconds for its next token; 0 sets no limit. Use it within one thread."""

    def __init__(
        self, max_pause: float, cost: Costs, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._max_pause = max_pause
        self._cost = cost
        self._clock = clock
        self._answered = clock()
        self._step_seconds = 0.0
        self._part_began = self._answered
        self._part_seconds = 0.0

    def __bool__(self) -> bool:
        """Whether there is a limit."""
        return self._max_pause > 0

    def answered(self, began: float) -> None:
        """Notes that answers have their next tokens now, of a step that ``began`` then."""
        self._answered = self._part_began = self._clock()
        self._step_seconds = self._answered - began

    def is_over(self) -> bool:
        """Whether answers would wait too long if they had to wait for one more part of a forward.
        Call it before each part: layers have a long and a short part, so the next one is taken to
        last as long as the longer of the last two. Where the answers' own steps take long, the
        forward goes on for as long as one of them: it would hardly end otherwise."""
        now = self._clock()
        last, self._part_seconds = self._part_seconds, now - self._part_began
        self._part_began = now
        longer = max(last, self._part_seconds)
        limit = max(self._max_pause, 2 * self._step_seconds)
        return now + longer + self._step_seconds > self._answered + limit

    def allows(self, rows: int, keys: int) -> bool:
        """Whether a forward of ``rows`` rows over ``keys`` keys is known to be done in time."""
        within = self._cost.rows_within(self._max_pause, keys)
        return rows <= max(QUICK_ROWS, within or 0)

    def slice_rows(self, most: int, keys: int) -> int:
        """How many rows of a prompt, at most ``most``, a forward computes in time: a power of two,
        so that slices of one size end where those of another do."""
        within = self._cost.rows_within(self._max_pause, keys) if self else None
        if within is None or within >= most:
            return most
        return min(most, max(LEAST_SLICE, 1 << within.bit_length() >> 1))
