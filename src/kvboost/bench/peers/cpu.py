"""What used the processors: a server that shared them with other programs was not measured
fairly."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

PROC = Path("/proc")


def watch_cpu(group: int) -> Callable[[], float]:
    """Starts watching. The result gives the share of all processors' time that went, since then,
    neither to the process group ``group`` nor to this process; 0 where it is unknown."""
    began, busy, own = time.perf_counter(), _busy_s(), _group_s(group) + time.process_time()

    def others() -> float:
        spent = _busy_s() - busy - (_group_s(group) + time.process_time() - own)
        available = (time.perf_counter() - began) * (os.cpu_count() or 1)
        return min(1.0, max(0.0, spent / available))

    return others


def _busy_s() -> float:
    """Seconds since boot in which processors were not idle, with those a hypervisor took."""
    try:
        first = (PROC / "stat").read_text().partition("\n")[0].split()
    except OSError:
        return 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _group_s(group: int) -> float:
    """Seconds that the processes of a group have used, ended children included."""
    ticks = 0
    for stat in PROC.glob("[0-9]*/stat"):
        try:
            after_name = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has just ended
        if int(after_name[2]) == group:
            ticks += sum(map(int, after_name[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
