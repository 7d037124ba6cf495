"""The machine's memory, processor and GPU."""

from __future__ import annotations

import ctypes
import os
import time

import torch

from kvboost.model.execution.host_memory import host_memory


def memory_bytes() -> int:
    """The memory of this machine; 0 if the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 0


def available_bytes() -> int:
    """The memory that programs can still have without swapping; half of it all if the system does
    not say."""
    try:
        with open("/proc/meminfo") as lines:
            sizes = dict(line.split(":") for line in lines)
        return int(sizes["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return memory_bytes() // 2


def release_freed_memory() -> None:
    """Gives memory that was freed, but that the C library keeps, back to the system, where it can
    do that. It takes a few milliseconds."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def copy_bandwidth(device: str) -> float:
    """Bytes per second that a copy within the device's memory reads and writes, measured."""
    size = 2 << 30 if device == "cuda" else 1 << 26
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    return 2 * _rate(source, torch.empty_like(source))


def bus_bandwidth(device: torch.device, num_bytes: int = 256 << 20) -> float:
    """Bytes per second of copies from registered memory of the host to a GPU, measured."""
    source = host_memory(num_bytes)
    return _rate(source, torch.empty_like(source, device=device))


def _rate(source: torch.Tensor, target: torch.Tensor) -> float:
    """Bytes per second of copies, the best of four rounds of four."""
    target.copy_(source)
    found = []
    for _ in range(4):
        started = time.perf_counter()
        for _ in range(4):
            target.copy_(source, non_blocking=True)
        target[:1].tolist()  # waits for the copies
        found.append((time.perf_counter() - started) / 4)
    return source.nbytes / min(found)
