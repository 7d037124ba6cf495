"""The machine that a number was measured on."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch


def describe(device: object, dtype: object) -> dict[str, str | int]:
    described: dict[str, str | int] = {
        **here(),
        "device": str(device),
        "dtype": str(dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
    if str(device).startswith("cuda"):
        described["gpu"] = torch.cuda.get_device_name(torch.device(str(device)))
    return described


def here() -> dict[str, str | int]:
    """The machine as far as no model is concerned."""
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@contextmanager
def memory_fence(device: torch.device, num_bytes: int) -> Iterator[None]:
    """Torch refuses to take more of a GPU's memory than this; its peak is counted anew."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total), device)
    try:
        yield
    finally:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1.0, device)
