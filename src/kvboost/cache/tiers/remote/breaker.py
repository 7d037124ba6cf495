"""A circuit breaker: keeps calls away from a store that keeps failing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

FAILURES = 3
"""So many in a row open the breaker."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
"""Seconds."""

State = Literal["closed", "open", "half-open"]


class Breaker:
    """Thread-safe. Closed: calls pass. After some failures in a row it opens: no call passes for
    the first pause. Then it is half-open: one call passes as a trial. Success closes the breaker,
    failure opens it for twice as long, up to the longest pause. The result of a call that began
    before the last change of state is ignored."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._failures = 0
        self._pause = FIRST_PAUSE
        self._open_until: float | None = None  # None: closed
        self._on_trial = False
        self._epoch = 0  # how often the state has changed

    @property
    def state(self) -> State:
        with self._lock:
            if self._open_until is None:
                return "closed"
            return "half-open" if self._on_trial or self._clock() >= self._open_until else "open"

    def enter(self) -> int | None:
        """A number if a call may be made, else None. Give it to :meth:`leave` after the call."""
        with self._lock:
            if self._open_until is not None:
                if self._on_trial or self._clock() < self._open_until:
                    return None
                self._on_trial = True
                self._epoch += 1
            return self._epoch

    def leave(self, entered: int, succeeded: bool) -> None:
        """``entered``: what :meth:`enter` gave."""
        with self._lock:
            if entered != self._epoch:
                return
            if succeeded:
                self._failures = 0
                self._pause = FIRST_PAUSE
                if self._on_trial:
                    self._change(None)
            elif self._on_trial:
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
                self._change(self._clock() + self._pause)
            else:
                self._failures += 1
                if self._failures >= FAILURES:
                    self._change(self._clock() + self._pause)

    def _change(self, open_until: float | None) -> None:
        self._open_until = open_until
        self._on_trial = False
        self._failures = 0
        self._epoch += 1
