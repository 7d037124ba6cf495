"""The work that waits for idle time: conversations to be healed, and documents to be read in one
more context. It is kept as token ids and a few numbers, without KV."""

from __future__ import annotations

import itertools
import threading
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import ClassVar, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvboost.config import GenerationMode, SamplingParams
from kvboost.results import Healing
from kvboost.runtime.audit import AnswerComparison
from kvboost.runtime.request import Request, RequestState
from kvboost.tokens.hashing import TokenIds, window_polynomials

WINDOW = 32
NUM_WINDOWS = 16
TEMPLATE_TOKENS = 8
"""The end of a prompt, which opens the answer. Chat templates write it differently in the history,
with ``<think>`` for instance."""
LEAST_SHARE = 0.75
"""Less would take the same question about other documents for a next turn."""

Places = Mapping[int, int]
"""Where windows begin in a text, by their hash."""


class Trail:
    """The text of one turn, and 16 windows of its prompt by which to know it again."""

    def __init__(self, token_ids: TokenIds, num_prompt: int) -> None:
        """``token_ids``: a prompt of ``num_prompt`` tokens and its answer."""
        self.token_ids = token_ids
        self._last = num_prompt - TEMPLATE_TOKENS - WINDOW
        end = token_ids[self._last : self._last + WINDOW] if self._last >= 0 else token_ids[:0]
        self.ending: list[int] = window_polynomials(end, WINDOW).tolist()
        """The last window; none if the prompt is shorter than that."""

    @cached_property
    def windows(self) -> list[int]:
        if self._last < 0:
            return []
        starts = np.unique(np.linspace(0, self._last, NUM_WINDOWS).astype(int))
        chosen = self.token_ids[starts[:, None] + np.arange(WINDOW)].ravel()
        windows: list[int] = window_polynomials(chosen, WINDOW)[::WINDOW].tolist()
        return windows

    def leads_to(self, token_ids: TokenIds, places: Places) -> bool:
        """Whether ``token_ids``, with these windows at ``places``, goes on from this turn: it
        begins with the whole turn, or contains the end of its prompt and most of the rest in the
        same order."""
        own = self.token_ids
        if len(own) <= len(token_ids) and np.array_equal(own, token_ids[: len(own)]):
            return True
        if not self.windows or self.windows[-1] not in places:
            return False
        # The longest sequence of places that never falls: ends[i] is the least end of one of i + 1.
        ends: list[int] = []
        for place in (places[window] for window in self.windows if window in places):
            at = bisect_right(ends, place)
            ends[at : at + 1] = [place]
        return len(ends) >= LEAST_SHARE * len(self.windows)


def leading_to(trails: Sequence[Trail], token_ids: TokenIds) -> list[int]:
    """Which of ``trails``, by number, ``token_ids`` goes on from. Most are ruled out by their last
    window: the thread that computes answers asks this at the end of each request."""
    hashes = window_polynomials(token_ids, WINDOW)
    ends = find_places((one for trail in trails for one in trail.ending), hashes)
    near = [n for n, one in enumerate(trails) if not one.ending or one.ending[0] in ends]
    places = find_places((one for n in near for one in trails[n].windows), hashes)
    return [n for n in near if trails[n].leads_to(token_ids, places)]


def find_places(windows: Iterable[int], hashes: npt.NDArray[np.uint64]) -> Places:
    """Where ``windows`` first begin in a text that has windows of these ``hashes``."""
    wanted = np.array(sorted({*windows}), np.uint64)
    if not len(wanted):
        return {}
    nearest = wanted[np.searchsorted(wanted[1:], hashes, side="right")]
    found = np.flatnonzero(nearest == hashes)[::-1]
    return dict(zip(hashes[found].tolist(), found.tolist(), strict=True))


MOST_CONVERSATIONS = 64
MOST_TOKENS = 1024**2
"""Token ids of all conversations that wait. If there are more, those that were used longest ago are
dropped."""
MOST_IMAGE_BYTES = 256 * 1024**2
"""Files of their images."""
MOST_READ_TOKENS = 8 * 1024**2
"""Token ids of all documents that wait. Further ones are not taken."""
_ONE_TOKEN = SamplingParams(max_new_tokens=1)


@dataclass(eq=False)
class IdleWork:
    """Text whose rows are to be computed and kept."""

    counted_as: ClassVar[str]
    """The prefix of its names in ``IdleQueue.counts``."""
    failure: ClassVar[str]
    """The message to log if it fails."""

    request: Request
    """Asks for all of its rows, exactly."""
    epoch: int
    """The store's when the request was planned. Once something is forgotten, this text may contain
    it, and is not computed."""
    number: int
    """Larger than that of all work that was added before."""

    @property
    def num_rows(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_bytes(self) -> int:
        """The files of its images, which are needed to compute their rows."""
        images = self.request.images
        return 0 if images is None else sum(len(image.data) for image in images.placed)

    @property
    def num_logits(self) -> int:
        """Logits of how many of the last rows are to be seen; at least one."""
        return 1

    def see(self, logits: torch.Tensor) -> None:
        """Takes the logits of rows that were computed."""

    def end(self, status: str) -> None:
        """Nothing more will be computed, because it is ``done``, ``replaced``, ``dropped`` or
        ``failed``."""


@dataclass(eq=False)
class Reading(IdleWork):
    """A document after other text, which no request has asked for."""

    counted_as = "readings "
    failure = "a document could not be read in another context"


@dataclass(eq=False)
class Unhealed(IdleWork):
    """A conversation with approximate rows."""

    counted_as = ""
    failure = "a conversation could not be healed"

    num_prompt: int
    """How many of its rows the request was asked with; the others are its answer."""
    exact_rows: int
    """How many of the first ones were exact when the answer ended."""
    healing: Healing
    comparison: AnswerComparison
    trail: Trail

    @property
    def num_logits(self) -> int:
        first = self.num_prompt - 1 + self.comparison.num_done
        return max(1, self.num_rows - first)

    def see(self, logits: torch.Tensor) -> None:
        self.comparison.add(logits)

    def end(self, status: str) -> None:
        if status == "done":
            self.healing.audit = self.comparison.result()
        self.healing.status = status


W = TypeVar("W", bound=IdleWork)


class Line(Generic[W]):
    """Work that waits, in the order in which it was added first, and how many tokens and bytes of
    images it has. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: list[W] = []
        self.num_tokens = self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[W]:
        return iter(self._waiting)

    def add(self, one: W) -> None:
        insort(self._waiting, one, key=attrgetter("number"))
        self.num_tokens += one.num_rows
        self.num_bytes += one.num_bytes

    def remove(self, one: W) -> None:
        self._waiting.remove(one)
        self.num_tokens -= one.num_rows
        self.num_bytes -= one.num_bytes

    def take(self, *, newest: bool = False) -> W:
        """Removes and returns the oldest piece of work, or the newest."""
        one = self._waiting.pop(-1 if newest else 0)
        self.num_tokens -= one.num_rows
        self.num_bytes -= one.num_bytes
        return one


class IdleQueue:
    """Thread-safe. Requests that run hold idle work up without taking a lock, because the garbage
    collector may end one in a thread that holds any of ours."""

    def __init__(self) -> None:
        self.conversations = Line[Unhealed]()
        self.readings = Line[Reading]()
        self._numbers = itertools.count()
        self._holds: set[object] = set()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.on_added: Callable[[], None] = lambda: None
        """Called after work was added, without a lock."""
        self.on_healed: Callable[[Request, Healing], None] = lambda request, healing: None
        """Called after a conversation was healed while it answered, without a lock."""

    def __len__(self) -> int:
        return len(self.conversations) + len(self.readings)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Nothing is computed in idle time until the context exits."""
        mark = object()
        self._holds.add(mark)
        try:
            yield
        finally:
            self._holds.discard(mark)

    @property
    def is_held(self) -> bool:
        return bool(self._holds)

    def add_unhealed(self, state: RequestState, ids: TokenIds, *, takes_likeliest: bool) -> None:
        """Takes in a request that has ended, of which the rows of ``ids`` were kept, if it is to be
        healed, in place of the turns that it goes on from. ``takes_likeliest``: each of its tokens
        was the likeliest one."""
        request = state.request
        if request.images is not None:  # its rows may attend to those that are missing
            ids = ids[: request.images.uncut_end(len(ids))]
        num_rows = len(ids)
        with self._lock:
            self._replace(request, ids)
        if request.heal == "off" or num_rows <= state.exact_rows:
            return
        answer = state.token_ids if takes_likeliest else []
        state.healing = Healing(num_rows - state.exact_rows)
        one = Unhealed(
            replace(
                request,
                token_ids=ids,
                mode=GenerationMode.PREFIX_CACHE,
                params=_ONE_TOKEN,
                grammar=None,
            ),
            state.epoch,
            next(self._numbers),
            len(request.token_ids),
            state.exact_rows,
            state.healing,
            AnswerComparison(list(state.recorded), answer),
            Trail(ids, min(num_rows, len(request.token_ids))),
        )
        state.recorded.clear()
        line = self.conversations
        with self._lock:
            line.add(one)
            self.counts["approximate_tokens"] += one.healing.approximate_tokens
            while len(line) > MOST_CONVERSATIONS or (
                (line.num_tokens > MOST_TOKENS or line.num_bytes > MOST_IMAGE_BYTES)
                and len(line) > 1
            ):
                self._finish(line.take(), "dropped")
        self.on_added()

    def add_reading(self, request: Request, epoch: int) -> bool:
        """Takes in a document that ``request`` reads, unless too many wait. It is read when no
        conversation is to be healed."""
        one, line = Reading(request, epoch, next(self._numbers)), self.readings
        with self._lock:
            if line.num_tokens + one.num_rows > MOST_READ_TOKENS and len(line):
                return False
            line.add(one)
        self.on_added()
        return True

    def add_healed(self, state: RequestState, superseded: int) -> None:
        """Counts a request that became exact while it answered."""
        if state.healing is not None:
            rows = state.healing.healed_tokens
            with self._lock:
                self._replace(state.request, state.request.token_ids)
                self.counts["done"] += 1
                self.counts["superseded_chunks"] += superseded
                for name in ("approximate_tokens", "healed_tokens", "computed_tokens"):
                    self.counts[name] += rows
            self.on_healed(state.request, state.healing)

    def take(self) -> IdleWork | None:
        """The conversation that was used last, or the document that has waited longest if there is
        none. Give it back with ``put_back`` or ``finish`` it."""
        with self._lock:
            if len(self.conversations):
                return self.conversations.take(newest=True)
            return self.readings.take() if len(self.readings) else None

    def put_back(self, one: IdleWork) -> None:
        """Queues work again that a request has interrupted, unless later turns of its conversation
        have come."""
        with self._lock:
            self._count(one, "interrupted")
            if isinstance(one, Reading):
                self.readings.add(one)
            elif isinstance(one, Unhealed):
                later = [other for other in self.conversations if other.number > one.number]
                self.conversations.add(one)
                for other in later:
                    if one.healing.status == "waiting":
                        self._replace(other.request, other.request.token_ids, [one])

    def finish(self, one: IdleWork, status: str) -> None:
        with self._lock:
            self._finish(one, status)

    def count(self, one: IdleWork, name: str, number: int) -> None:
        """Adds to what :attr:`counts` has under ``name`` for work of this kind."""
        with self._lock:
            self._count(one, name, number)

    def clear(self) -> None:
        """Drops everything."""
        with self._lock:
            for line in (self.conversations, self.readings):
                while len(line):
                    self._finish(line.take(), "dropped")

    def _replace(
        self, request: Request, ids: TokenIds, turns: Iterable[Unhealed] | None = None
    ) -> None:
        """Ends the healing of those of ``turns`` that ``ids``, a turn that ``request`` asked for,
        goes on from; of all that wait by default. What it computes for ``ids`` is of more use."""
        line = self.conversations
        same = [
            one
            for one in (line if turns is None else turns)
            if (one.request.salt, one.request.adapter) == (request.salt, request.adapter)
        ]
        for number in leading_to([one.trail for one in same], ids) if same else ():
            line.remove(same[number])
            self._finish(same[number], "replaced")

    def _finish(self, one: IdleWork, status: str) -> None:
        one.end(status)
        self._count(one, status)

    def _count(self, one: IdleWork, name: str, number: int = 1) -> None:
        self.counts[one.counted_as + name] += number
