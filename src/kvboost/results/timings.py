"""The times of a request, phase by phase."""

from __future__ import annotations

import time
from dataclasses import dataclass

PHASES = (
    *("tokenize", "queue", "plan", "fetch", "assemble"),
    *("probe", "repair", "prefill", "decode", "admit"),
)


class Clock:
    """Splits one request's time into phases that add up to the total.

    The clock starts when it is created, at call entry. ``lap`` charges the time since the last lap
    to a phase, so no time is counted twice and none is lost.
    """

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._first_token: float | None = None
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def lap(self, phase: str) -> float:
        """Charges the time since the last lap to ``phase``; returns it, in seconds."""
        now = time.perf_counter()
        seconds = now - self._last
        self._seconds[phase] += seconds
        self._last = now
        return seconds

    def leave_out(self, seconds: float) -> None:
        """Leaves out time that the caller spent between two pieces of a stream."""
        self._start += seconds
        self._last += seconds
        if self._first_token is not None:
            self._first_token += seconds

    def first_token(self) -> None:
        """Marks the moment when the first token is on the host."""
        if self._first_token is None:
            self._first_token = time.perf_counter()

    def timings(self) -> Timings:
        first = self._last if self._first_token is None else self._first_token
        return Timings(
            ttft_ms=(first - self._start) * 1e3,
            total_ms=(self._last - self._start) * 1e3,
            **{f"{phase}_ms": seconds * 1e3 for phase, seconds in self._seconds.items()},
        )


@dataclass(frozen=True)
class Timings:
    """Milliseconds. The phases add up to ``total_ms``. ``ttft_ms`` is the time from call entry
    until the first token is on the host."""

    ttft_ms: float
    total_ms: float
    tokenize_ms: float
    queue_ms: float
    """Waiting for other requests, in a batch."""
    plan_ms: float
    fetch_ms: float
    assemble_ms: float
    probe_ms: float
    repair_ms: float
    prefill_ms: float
    decode_ms: float
    admit_ms: float
