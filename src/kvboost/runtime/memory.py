"""Returning freed memory to the system."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable

EVERY = 8


class Trimmer:
    """Makes the C library return unused memory from time to time.

    A forward allocates and frees tensors of many sizes, and longer-lived objects end up between
    them. Without trimming, the heap of a long-running process grows to a multiple of what is in
    use. Trimming takes a few milliseconds.
    """

    def __init__(self) -> None:
        self._trim = _find()
        self._requests = 0
        self._lock = threading.Lock()

    def after_request(self) -> None:
        """Call it at the end of every request. It trims after each ``EVERY`` requests."""
        with self._lock:
            self._requests += 1
            due = self._requests % EVERY == 0
        if due and self._trim is not None:
            self._trim(0)


def _find() -> Callable[[int], int] | None:
    """glibc's ``malloc_trim``. Other C libraries have no such function."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    return trim
