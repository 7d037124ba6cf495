"""The device and the dtype that a model runs with."""

from __future__ import annotations

import platform

import torch

from kvboost.config import DTYPES, one_of
from kvboost.errors import ConfigError


def pick_device(device: str | torch.device | None) -> torch.device:
    """The device asked for, or the best one there is."""
    if device is None:
        if torch.cuda.is_available():
            return torch.device("cuda")
        if torch.backends.mps.is_available():
            return torch.device("mps")
        return torch.device("cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device={device!r} is unknown; use 'cpu', 'cuda' or 'mps'") from None
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}: torch finds no CUDA device; use device='cpu'")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError(f"device={device!r}: torch finds no MPS device; use device='cpu'")
    return chosen


def pick_split_device(device: str | torch.device | None, tp_size: int) -> torch.device:
    """The kind of device for ``tp_size`` ranks of one model."""
    chosen = pick_device(device)
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if chosen.type == "mps" or (chosen.type == "cpu" and there):
        raise ConfigError(
            f"tp_size={tp_size}: transformers splits models over CUDA devices if there are any, "
            f"else over processes on the CPU, not over device={str(chosen)!r}; leave device out "
            "or use tp_size=1"
        )
    if chosen.type == "cuda" and (chosen.index is not None or tp_size > there):
        raise ConfigError(
            f"tp_size={tp_size} takes the first {tp_size} CUDA devices, and there are {there}; use "
            "device='cuda' or none, and tp_size up to that number"
        )
    return chosen


def pick_streaming_device(device: str | torch.device | None) -> torch.device:
    """The device for a model whose layers are streamed to it."""
    chosen = pick_device(device)
    if chosen.type != "cuda":
        raise ConfigError(
            f"device_memory is a budget for an NVIDIA GPU, and the model runs on {chosen}: there "
            "the weights are in the machine's memory already; leave device_memory out, or use "
            "device='cuda'"
        )
    return chosen


def has_capability(device: torch.device) -> bool:
    """Whether this is an NVIDIA GPU of compute capability 8.0 or later, for which our kernels and
    torch's int4 product are made."""
    is_nvidia = device.type == "cuda" and torch.version.cuda is not None
    return is_nvidia and torch.cuda.get_device_capability(device) >= (8, 0)


def chip_name(device: torch.device) -> str:
    """The kind and the name of what computes there."""
    is_cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_cuda else platform.machine()
    return f"{device.type} {name}"


def pick_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype asked for, or one that the device computes well."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype is not None:
        one_of(dtype, DTYPES, "dtype")
        chosen: torch.dtype = getattr(torch, dtype)
        return chosen
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    if device.type == "mps":
        return torch.float16
    return torch.bfloat16 if cpu_has_bf16() else torch.float32


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bfloat16 matrices natively (AMX or AVX-512 BF16)."""
    return bool(torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported())


def slow_dtype(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why a model that computes in ``dtype`` is slow on ``device``; None if it is not."""
    if device.type != "cpu":
        return None
    if dtype == torch.float16:
        return "float16 is slow on CPUs"
    if dtype == torch.bfloat16 and not (cpu_has_bf16() or _arm_has_bf16()):
        return "bfloat16 is emulated on this CPU and many times slower than float32"
    return None


def _arm_has_bf16() -> bool:
    """Whether this is an ARM processor with instructions for bfloat16, which oneDNN then uses."""
    is_arm = platform.machine() in ("aarch64", "arm64")
    return is_arm and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
