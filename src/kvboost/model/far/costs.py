"""The time that attending to far rows takes: learned while requests run."""

from __future__ import annotations

import threading
from collections import deque
from statistics import median

TRIED_SHARE = 1 / 8
"""The share of the rows that the host attends to until its pace is known."""
LEAST_SHARE = 1 / 16
"""The host, or the device, attends to all rows if the other one would to fewer than this."""
STEPS = 32
"""Shares are multiples of one over this, and only change by more than one step: rows that are
loaded ahead are then those that are needed."""
_KEPT = 15
"""The number of measurements of each kind that count."""


class FarCosts:
    """Seconds per byte of far rows: of copying them to the device, and of attending to them on the
    host, which depends on the number of queries. Thread-safe."""

    def __init__(self) -> None:
        self._stream: deque[float] = deque(maxlen=_KEPT)
        self._host: dict[int, deque[float]] = {}
        self._shares: dict[int, float] = {}
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
        """Seconds per byte; None until something was measured."""
        with self._lock:
            known = self._host.get(_kind(num_queries))
            return median(known) if known else None

    def host_share(self, num_queries: int) -> float:
        """The share of far rows that the host should attend to while the others are copied to the
        device: both then take the same time."""
        stream, host = self.stream(), self.host(num_queries)
        if stream is None:
            return 0.0
        if host is None:
            return TRIED_SHARE
        wanted = stream / (stream + host)
        if wanted < LEAST_SHARE or wanted > 1 - LEAST_SHARE:
            wanted = round(wanted)
        with self._lock:
            kind = _kind(num_queries)
            last = self._shares.get(kind)
            if last is None or abs(wanted - last) > 1 / STEPS:
                self._shares[kind] = last = round(wanted * STEPS) / STEPS
            return last


def _kind(num_queries: int) -> int:
    """Numbers of rows between two powers of two cost about the same for each byte."""
    return max(num_queries, 1).bit_length()
