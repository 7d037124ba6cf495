"""How an engine differs on CPUs, on NVIDIA GPUs and on other GPUs."""

from __future__ import annotations

import platform
import time
from pathlib import Path
from typing import Any

import torch

from kvboost.cache.quantize import RowCodec
from kvboost.config import EngineConfig
from kvboost.errors import ConfigError
from kvboost.model import native
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.far.place import FarPlace, in_file, on_host
from kvboost.model.loading.machine import memory_bytes

MEMORY_SHARE = 0.25
"""Of a machine's memory, or twice that of what is free on a GPU, for the KV of running requests."""


class Device:
    """Any GPU. A forward costs launches first, so that fewer, larger ones are better."""

    slice_rows = 16384
    """Rows of a prompt that go through the model together."""
    step_rows = 2048
    """The same while other requests answer."""
    embedded_rows = 2048
    max_running: int | None = None
    """Requests that run at once by default; None: what the config says for all devices."""
    chunk_size: int | None = None
    """Tokens in a chunk by default; None: the same."""
    is_host = False
    """Whether rows are where chunks in RAM are, and forwards take so long that others should run
    between their layers."""
    gpu: torch.device | None = None
    """The device, if it is an NVIDIA GPU."""
    collectives = "gloo"
    """The backend over which ranks with such devices exchange tensors, as torch names it."""
    clock = staticmethod(time.perf_counter)
    """The clock that steps are measured with. Use it within one thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def kv_bytes(self) -> int:
        """How many bytes the KV of running requests may take."""
        return int(memory_bytes() * MEMORY_SHARE) or 4 * 1024**3

    def facts(self, dtype: torch.dtype) -> dict[str, Any]:
        """The name of the device, and what runs a model of this ``dtype`` on it."""
        name = platform.processor() or platform.machine()
        return {"device_name": name, "threads": None, "kernels": None}

    def far_place(self, config: EngineConfig, shape: KVShape, near: int) -> FarPlace | str:
        """Where far rows are, beside so many bytes of near ones; or why there are none."""
        return f"rows are copied to CPUs and NVIDIA GPUs only, not to {self.device.type!r}"


class Cpu(Device):
    slice_rows = 1024
    step_rows = embedded_rows = 256
    is_host = True
    # Counts the time in which this thread ran: other programs make some steps much longer than
    # others, and if steps of all sizes seem to take as long, drafts seem to cost nothing.
    clock = staticmethod(time.thread_time)

    def facts(self, dtype: torch.dtype) -> dict[str, Any]:
        kernels = native.describe(dtype)
        return {**super().facts(dtype), "threads": torch.get_num_threads(), "kernels": kernels}

    def far_place(self, config: EngineConfig, shape: KVShape, near: int) -> FarPlace | str:
        if config.far_kv_bits < 16:
            raise ConfigError(
                f"far_kv_bits={config.far_kv_bits} needs a model on a GPU; on a CPU, far rows are "
                "as the model computes them: leave it at 16"
            )
        folder = config.far_kv_dir
        return in_file(shape, None if folder is None else Path(folder).expanduser())


class NvidiaGpu(Device):
    max_running = 64  # they take little longer for a step than 16
    # Chunks are pages there, so that large ones cost no copies; the host's time goes by chunks.
    chunk_size = 512
    collectives = "cpu:gloo,cuda:nccl"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.gpu = device

    def kv_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[0] * 2 * MEMORY_SHARE)

    def facts(self, dtype: torch.dtype) -> dict[str, Any]:
        return {**super().facts(dtype), "device_name": torch.cuda.get_device_name(self.device)}

    def far_place(self, config: EngineConfig, shape: KVShape, near: int) -> FarPlace | str:
        codec = RowCodec(config.far_kv_bits) if config.far_kv_bits < 16 else None
        return on_host(shape, near, codec)


def device_of(device: torch.device) -> Device:
    return {"cpu": Cpu, "cuda": NvidiaGpu}.get(device.type, Device)(device)
