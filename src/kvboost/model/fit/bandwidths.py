"""The speed at which this machine moves weights: measured once, in a second or two, and kept."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from kvboost.config import home
from kvboost.model.loading.machine import bus_bandwidth, copy_bandwidth, memory_bytes

RAM_BYTES = 128 << 20
DISK_BYTES = 32 << 20
"""Read to find out how fast that is."""
FILE = "bandwidths.json"


@dataclass(frozen=True)
class Bandwidths:
    """Bytes per second; None where there is nothing to measure."""

    ram: float
    """Reading memory, with all threads."""
    disk: float | None
    """Reading a file in KVBoost's folder."""
    bus: float | None = None
    """From registered memory to the GPU."""
    gpu: float | None = None
    """Reading and writing the GPU's memory."""


def bandwidths(*, again: bool = False) -> Bandwidths:
    """Those of this machine, as measured before, or now if they were not, or are to be
    ``again``."""
    path, key = home() / FILE, _machine()
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        kept = json.loads(path.read_text())
        if kept["machine"] == key and not again:
            return Bandwidths(**kept["bytes_per_s"])
    found = _measure()
    with contextlib.suppress(OSError):  # a folder that cannot be written: measured again next time
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": key, "bytes_per_s": asdict(found)}))
    return found


def _machine() -> str:
    """The facts on which the figures depend."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{os.cpu_count()} cores, {torch.get_num_threads()} threads, {memory_bytes()}, {gpu}"


def _measure() -> Bandwidths:
    if not torch.cuda.is_available():
        return Bandwidths(_ram(), _disk())
    bus = bus_bandwidth(torch.device("cuda"))
    return Bandwidths(_ram(), _disk(), bus, copy_bandwidth("cuda"))


def _ram() -> float:
    numbers = torch.ones(RAM_BYTES // 8, dtype=torch.float64)
    return numbers.nbytes / min(_seconds(numbers.sum) for _ in range(4))


def _disk() -> float | None:
    """None if there is no folder to write to. What was written just now is dropped from memory
    first, where the system lets us."""
    try:
        home().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home()) as file:
            block = os.urandom(1 << 20)
            for _ in range(max(1, DISK_BYTES >> 20)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.seek(0)
            buffer = bytearray(8 << 20)
            size = file.tell()

            def read() -> None:
                nonlocal size
                while count := file.readinto(buffer):
                    size += count

            seconds = _seconds(read)
            return size / seconds
    except OSError:
        return None


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return max(time.perf_counter() - started, 1e-9)
