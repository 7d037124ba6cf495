"""What waits for idle time: conversations to be healed, and documents to be read in one more
context. Token ids and a few numbers, no KV."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from kvboost.config import GenerationMode, SamplingParams
from kvboost.results import Healing
from kvboost.runtime.audit import AnswerComparison
from kvboost.runtime.request import Request, RequestState
from kvboost.tokens.hashing import TokenIds

MOST_CONVERSATIONS = 64
MOST_TOKENS = 1024**2
"""Token ids of all conversations that wait. The oldest are dropped when there are more."""
MOST_READ_TOKENS = 8 * 1024**2
"""Token ids of all documents that wait. Further ones are not taken."""
_ONE_TOKEN = SamplingParams(max_new_tokens=1)


@dataclass(eq=False)
class IdleWork:
    """Text whose rows are to be computed and kept."""

    counted_as: ClassVar[str]
    """What names in ``IdleQueue.counts`` begin with."""
    failure: ClassVar[str]
    """What to say if it fails."""

    request: Request
    """Asks for all of its rows, exactly."""
    epoch: int
    """The store's when the request was planned. Once something is forgotten, this text may contain
    it, and is not computed."""

    @property
    def num_rows(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_logits(self) -> int:
        """Logits of how many of the last rows are to be seen; at least one."""
        return 1

    def see(self, logits: torch.Tensor) -> None:
        """Takes the logits of rows that were computed."""

    def end(self, status: str) -> None:
        """Nothing more will be computed, because it is ``done``, ``dropped`` or ``failed``."""


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


class Line:
    """Work that waits in order, and how many tokens it has. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: deque[IdleWork] = deque()
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, one: IdleWork, *, first: bool = False) -> None:
        (self._waiting.appendleft if first else self._waiting.append)(one)
        self.num_tokens += one.num_rows

    def take(self) -> IdleWork:
        """What has waited longest."""
        one = self._waiting.popleft()
        self.num_tokens -= one.num_rows
        return one


class IdleQueue:
    """Thread-safe. Requests that run hold idle work up without taking a lock, because the garbage
    collector may end one in a thread that holds any of ours."""

    def __init__(self) -> None:
        self._conversations = Line()
        self._readings = Line()
        self._holds: set[object] = set()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.on_added: Callable[[], None] = lambda: None
        """Called after work was added, without a lock."""
        self.on_healed: Callable[[Request, Healing], None] = lambda request, healing: None
        """Called after a conversation was healed while it answered, without a lock."""

    def __len__(self) -> int:
        return len(self._conversations) + len(self._readings)

    @property
    def num_conversations(self) -> int:
        """How many conversations wait to be healed."""
        return len(self._conversations)

    @property
    def num_readings(self) -> int:
        """How many documents wait to be read."""
        return len(self._readings)

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
        healed. ``takes_likeliest``: each of its tokens was the likeliest one."""
        request, num_rows = state.request, len(ids)
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
            len(request.token_ids),
            state.exact_rows,
            state.healing,
            AnswerComparison(list(state.recorded), answer),
        )
        state.recorded.clear()
        line = self._conversations
        with self._lock:
            line.add(one)
            self.counts["approximate_tokens"] += one.healing.approximate_tokens
            while len(line) > MOST_CONVERSATIONS or (
                line.num_tokens > MOST_TOKENS and len(line) > 1
            ):
                self._finish(line.take(), "dropped")
        self.on_added()

    def add_reading(self, request: Request, epoch: int) -> bool:
        """Takes in a document that ``request`` reads, unless too many wait. It is read when no
        conversation is to be healed."""
        one, line = Reading(request, epoch), self._readings
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
                self.counts["done"] += 1
                self.counts["superseded_chunks"] += superseded
                for name in ("approximate_tokens", "healed_tokens", "computed_tokens"):
                    self.counts[name] += rows
            self.on_healed(state.request, state.healing)

    def take(self) -> IdleWork | None:
        """The conversation that has waited longest, or a document if there is none. Give it back
        with ``put_back`` or ``finish`` it."""
        with self._lock:
            line = self._conversations if len(self._conversations) else self._readings
            return line.take() if len(line) else None

    def put_back(self, one: IdleWork) -> None:
        """A request has interrupted it."""
        line = self._conversations if isinstance(one, Unhealed) else self._readings
        with self._lock:
            line.add(one, first=True)
            self._count(one, "interrupted")

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
            for line in (self._conversations, self._readings):
                while len(line):
                    self._finish(line.take(), "dropped")

    def _finish(self, one: IdleWork, status: str) -> None:
        one.end(status)
        self._count(one, status)

    def _count(self, one: IdleWork, name: str, number: int = 1) -> None:
        self.counts[one.counted_as + name] += number
