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
