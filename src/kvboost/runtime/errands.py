"""Pieces of work that need the model for a moment, in the order in which they were given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class Errands:
    """Not thread-safe: the loop locks."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Future[Any], Callable[[], None]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, work: Callable[[], T]) -> Future[T]:
        """What becomes of ``work``."""
        errand: Future[T] = Future()

        def run() -> None:
            if errand.set_running_or_notify_cancel():
                try:
                    errand.set_result(work())
                except BaseException as error:
                    errand.set_exception(error)

        self._waiting.append((errand, run))
        return errand

    def next(self) -> Callable[[], None] | None:
        """What runs the first piece, which is removed; None if there is none."""
        return self._waiting.popleft()[1] if self._waiting else None

    def cancel(self) -> None:
        for errand, _ in self._waiting:
            errand.cancel()
