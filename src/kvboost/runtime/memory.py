"""Giving memory back to the system."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable

EVERY = 8


class Trimmer:
    """Has the C library give back what it holds and nobody uses, once in a while.

    A forward takes and frees tensors of many sizes, and what outlives it lies between them: left to
    itself, the heap of a long-running process grows to a multiple of what is in use. Giving it back
    takes a few milliseconds.
    """

    def __init__(self) -> None:
        self._trim = _find()
        self._requests = 0
        self._lock = threading.Lock()

    def after_request(self) -> None:
        """To be called at the end of every request; does something after each ``EVERY``."""
        with self._lock:
            self._requests += 1
            due = self._requests % EVERY == 0
        if due and self._trim is not None:
            self._trim(0)


def _find() -> Callable[[int], int] | None:
    """glibc's ``malloc_trim``; other libraries have none, and need none."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return trim
