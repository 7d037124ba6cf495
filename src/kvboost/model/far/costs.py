"""How long attending to far rows takes, by either method: learned while requests run."""

from __future__ import annotations

import threading
from collections import deque
from statistics import median
from typing import Literal

Method = Literal["host", "stream"]
_KEPT = 9
"""How many times are kept of each kind."""
ASK_AGAIN = 512
"""After so many choices the slower method is tried again: other work may have slowed it down."""


class FarCosts:
    """Seconds per byte of far rows: of copying them to the device, and of attending to them on the
    host, which depends on the number of queries. Thread-safe."""

    def __init__(self) -> None:
        self._stream: deque[float] = deque(maxlen=_KEPT)
        self._host: dict[int, deque[float]] = {}
        self._choices = 0
        self._lock = threading.Lock()

    def observe_stream(self, num_bytes: int, seconds: float) -> None:
        """Learns that so many bytes were copied to the device in ``seconds``."""
        if num_bytes > 0 and seconds > 0:
            with self._lock:
                self._stream.append(seconds / num_bytes)

    def observe_host(self, num_bytes: int, num_queries: int, seconds: float) -> None:
        """Learns that ``num_queries`` rows attended to so many bytes on the host."""
        if num_bytes > 0 and seconds > 0:
            with self._lock:
                kept = self._host.setdefault(_kind(num_queries), deque(maxlen=_KEPT))
                kept.append(seconds / num_bytes)

    def stream(self) -> float | None:
        """Seconds per byte; None until something was measured."""
        with self._lock:
            return median(self._stream) if self._stream else None

    def host(self, num_queries: int) -> float | None:
        with self._lock:
            known = self._host.get(_kind(num_queries))
            return median(known) if known else None

    def choose(self, num_queries: int) -> Method:
        """The faster method for so many rows; one that was not measured yet comes first."""
        stream, host = self.stream(), self.host(num_queries)
        with self._lock:
            self._choices += 1
            again = self._choices % ASK_AGAIN == 0
        if stream is None:
            return "stream"
        if host is None:
            return "host"
        faster: Method = "host" if host < stream else "stream"
        if again:
            return "stream" if faster == "host" else "host"
        return faster


def _kind(num_queries: int) -> int:
    """Numbers of rows between two powers of two cost about the same for each byte."""
    return max(num_queries, 1).bit_length()
