"""Work in idle time: healing, and graphs that were missing. It begins once no request has come for
a while."""

from __future__ import annotations

import time
from collections.abc import Callable

from kvboost.runtime.backend import Backend
from kvboost.runtime.healing import Healer, Stop
from kvboost.runtime.idle_work import IdleQueue

LEAST_SECONDS, MOST_SECONDS = 0.25, 8.0
LOOK_SECONDS = 0.25
"""How often to look whether requests outside the loop still hold work up. They end without a word:
the garbage collector may end one."""


class Quiet:
    """Says when idle work may begin. Requests come in bursts, and work that begins between two of
    them delays the next one. If a request comes soon after work began, it begins later the next
    time; if it had as much time as it waited, earlier. Use it within one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seconds = LEAST_SECONDS
        self._since = clock()

    def broken(self) -> None:
        """Notes that there are requests now."""
        self._since = self._clock()

    @property
    def seconds_left(self) -> float:
        """For how long no request must come from now on; 0 if work may begin."""
        return max(0.0, self._since + self._seconds - self._clock())

    def used(self, *, interrupted: bool) -> None:
        """Learns from work that has ended now, perhaps because a request came."""
        if self._clock() >= self._since + 2 * self._seconds:
            self._seconds = max(LEAST_SECONDS, self._seconds / 2)
        elif interrupted:
            self._seconds = min(MOST_SECONDS, 2 * self._seconds)


class IdleTime:
    """The idle time of a loop. Use it within one thread."""

    def __init__(self, backend: Backend, healer: Healer, queue: IdleQueue) -> None:
        self._backend, self._healer, self._queue = backend, healer, queue
        self._quiet = Quiet()

    def broken(self) -> None:
        """Notes that there are requests now."""
        self._quiet.broken()

    @property
    def has_work(self) -> bool:
        """Whether something is to be done now, if there are no requests."""
        if self._queue.is_held:
            self._quiet.broken()
        has_some = self._backend.lacks_graphs or self._healer.has_work
        return has_some and not self._quiet.seconds_left

    @property
    def look_again(self) -> float | None:
        """In how many seconds there may be work; None if some must be added before."""
        may_have_some = self._backend.lacks_graphs or len(self._queue)
        return self._quiet.seconds_left or LOOK_SECONDS if may_have_some else None

    def use(self, stop: Stop) -> None:
        """Works until ``stop`` says that a request has come, or one piece is done."""
        self._backend.record_missing(stop)
        if self._healer.has_work and not stop():
            self._healer.heal_next(stop)
        self._quiet.used(interrupted=stop())
