"""What waits for idle time: conversations to be healed, and documents to be read in one more
context. Token ids and a few numbers, no KV."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np

from kvboost.config import GenerationMode, SamplingParams
from kvboost.results import Healing
from kvboost.runtime.audit import AnswerComparison
from kvboost.runtime.request import Request, RequestState
from kvboost.tokens.hashing import as_token_ids

MOST_CONVERSATIONS = 64
MOST_TOKENS = 1024**2
"""Token ids of all conversations that wait. The oldest are dropped when there are more."""
MOST_READ_TOKENS = 8 * 1024**2
"""Token ids of all documents that wait. Further ones are not taken."""


@dataclass(eq=False)
class Unhealed:
    """A conversation with approximate rows."""

    request: Request
    """Asks for all of its rows, exactly."""
    num_prompt: int
    """How many of them the request was asked with; the others are its answer."""
    exact_rows: int
    """How many of the first ones were exact when the answer ended."""
    epoch: int
    """The store's when the request was planned. Once something is forgotten, this conversation may
    contain it, and is not healed."""
    healing: Healing
    comparison: AnswerComparison
    is_reading: bool = False
    """Whether it is a document after other text, which no request has asked for."""

    @property
    def num_rows(self) -> int:
        return len(self.request.token_ids)

    @property
    def num_logits(self) -> int:
        """Logits of how many of the last rows are still to be compared; at least one."""
        first = self.num_prompt - 1 + self.comparison.num_done
        return max(1, self.num_rows - first)


class UnhealedQueue:
    """Thread-safe. Requests that run hold healing up without taking a lock, because the garbage
    collector may end one in a thread that holds any of ours."""

    def __init__(self) -> None:
        self._waiting: deque[Unhealed] = deque()
        self._tokens = 0
        self._readings: deque[Unhealed] = deque()
        self._reading_tokens = 0
        self._holds: set[object] = set()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.on_added: Callable[[], None] = lambda: None
        """Called after a conversation was added, without a lock."""
        self.on_healed: Callable[[Request, Healing], None] = lambda request, healing: None
        """Called after one was healed while it answered, without a lock."""

    def __len__(self) -> int:
        return len(self._waiting) + len(self._readings)

    @property
    def num_conversations(self) -> int:
        """How many conversations wait to be healed."""
        return len(self._waiting)

    @property
    def num_readings(self) -> int:
        """How many documents wait to be read."""
        return len(self._readings)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Nothing is healed in idle time until the context exits."""
        mark = object()
        self._holds.add(mark)
        try:
            yield
        finally:
            self._holds.discard(mark)

    @property
    def is_held(self) -> bool:
        return bool(self._holds)

    def add(self, state: RequestState, num_rows: int, *, takes_likeliest: bool) -> None:
        """Takes in a request that has ended, of which ``num_rows`` rows were kept, if it is to be
        healed. ``takes_likeliest``: each of its tokens was the likeliest one."""
        request = state.request
        if request.heal == "off" or num_rows <= state.exact_rows:
            return
        ids = as_token_ids(np.concatenate([request.token_ids, state.token_ids])[:num_rows])
        answer = state.token_ids if takes_likeliest else []
        state.healing = Healing(num_rows - state.exact_rows)
        one = Unhealed(
            replace(
                request,
                token_ids=ids,
                mode=GenerationMode.PREFIX_CACHE,
                params=SamplingParams(max_new_tokens=1),
                grammar=None,
            ),
            len(request.token_ids),
            state.exact_rows,
            state.epoch,
            state.healing,
            AnswerComparison(list(state.recorded), answer),
        )
        state.recorded.clear()
        with self._lock:
            self._waiting.append(one)
            self._tokens += one.num_rows
            self.counts["approximate_tokens"] += one.healing.approximate_tokens
            while len(self._waiting) > MOST_CONVERSATIONS or (
                self._tokens > MOST_TOKENS and len(self._waiting) > 1
            ):
                self._finish(self._pop(), "dropped")
        self.on_added()

    def add_reading(self, request: Request, epoch: int) -> bool:
        """Takes in a document that ``request`` reads, unless too many wait. It is read when no
        conversation is to be healed."""
        ids = request.token_ids
        one = Unhealed(
            request,
            len(ids),
            0,
            epoch,
            Healing(0),
            AnswerComparison([], []),
            is_reading=True,
        )
        with self._lock:
            if self._reading_tokens + one.num_rows > MOST_READ_TOKENS and self._readings:
                return False
            self._readings.append(one)
            self._reading_tokens += one.num_rows
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

    def take(self) -> Unhealed | None:
        """The conversation that has waited longest, or a document if there is none. Give it back
        with ``put_back`` or ``finish`` it."""
        with self._lock:
            return self._pop() if self._waiting else self._pop_reading()

    def put_back(self, one: Unhealed) -> None:
        with self._lock:
            if one.is_reading:
                self._readings.appendleft(one)
                self._reading_tokens += one.num_rows
            else:
                self._waiting.appendleft(one)
                self._tokens += one.num_rows

    def finish(self, one: Unhealed, status: str) -> None:
        with self._lock:
            self._finish(one, status)

    def clear(self) -> None:
        """Drops all of them."""
        with self._lock:
            while self._waiting:
                self._finish(self._pop(), "dropped")
            while one := self._pop_reading():
                self._finish(one, "dropped")

    def _pop(self) -> Unhealed:
        one = self._waiting.popleft()
        self._tokens -= one.num_rows
        return one

    def _pop_reading(self) -> Unhealed | None:
        if not self._readings:
            return None
        one = self._readings.popleft()
        self._reading_tokens -= one.num_rows
        return one

    def _finish(self, one: Unhealed, status: str) -> None:
        one.healing.status = status
        self.counts[f"readings {status}" if one.is_reading else status] += 1
