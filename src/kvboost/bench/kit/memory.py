"""How much memory a process holds, and whether that grows."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence

MOST_GROWTH = 0.03
"""More growth than this is a problem."""


def resident_mb(pid: int | str = "self") -> float:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def levels(samples: Sequence[float]) -> tuple[float, float, float]:
    """The first, the last and the highest level of memory over time. A level is the median of a
    twentieth of ``samples``, since requests take memory and give it back."""
    few = -(-len(samples) // 20)
    medians = [statistics.median(samples[i : i + few]) for i in range(0, len(samples), few)]
    return medians[0], medians[-1], max(medians)
