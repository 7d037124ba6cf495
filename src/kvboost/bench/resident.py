"""How much memory a process holds, and whether that grows."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

MOST_GROWTH = 0.03
"""More than this is no longer called flat."""


def resident_mb(pid: int | str = "self") -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def levels(samples: Sequence[float]) -> tuple[float, float, float]:
    """Of ``samples`` over time, at the beginning, at the end, and at most: medians over twentieths
    of them, as requests take memory and give it back."""
    few = -(-len(samples) // 20)
    medians = [statistics.median(samples[i : i + few]) for i in range(0, len(samples), few)]
    return medians[0], medians[-1], max(medians)
