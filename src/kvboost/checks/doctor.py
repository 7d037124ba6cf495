"""``kvboost doctor``: what this machine has, and what would be slow on it and why."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import torch

from kvboost.config import home
from kvboost.model import native
from kvboost.model.execution.fast_layers import can_pack
from kvboost.model.fit.bandwidths import bandwidths
from kvboost.model.loading import weights
from kvboost.model.loading.device import cpu_has_bf16, pick_device, pick_dtype, slow_dtype
from kvboost.model.loading.machine import memory_bytes
from kvboost.model.paged.pool import why_no_pages
from kvboost.model.quantized.products import describe_path
from kvboost.runtime.devices import device_of


@dataclass(frozen=True)
class Findings:
    facts: dict[str, str | int | bool]
    advice: list[str]


def examine(model: str, device: str | None = None, dtype: str | None = None) -> Findings:
    """Looks at versions, device, memory and folders. Loads no model and fetches nothing."""
    chosen_device = pick_device(device)
    chosen_dtype = pick_dtype(dtype, chosen_device)
    advice = []
    kernels = "no: only on CPUs"
    kind = device_of(chosen_device)
    if kind.is_host:
        kernels = native.describe(chosen_dtype)
        advice.append(
            "no GPU is used: reading a prompt is the slow part here, and the part that reuse "
            "saves; `kvboost bench ttft` measures both"
        )
        if not cpu_has_bf16():
            advice.append(
                "this CPU has no bfloat16 matrix units, so float32 is the default; where there are "
                "some, a prefill takes about a third of the time"
            )
        slow = slow_dtype(chosen_dtype, chosen_device)
        if slow is not None:
            advice.append(f"{slow}; use --dtype float32")
        if torch.get_num_threads() < (os.cpu_count() or 1):
            advice.append(
                f"torch uses {torch.get_num_threads()} of {os.cpu_count()} cores; set "
                "OMP_NUM_THREADS to use more"
            )
    memory = memory_bytes()
    if 0 < memory < 4 * 1024**3:
        advice.append("less than 4 GiB of memory: lower max_cache_bytes")
    folder_state = _folder_state()
    if folder_state != "writable":
        advice.append(f"the cache folder {home()} is {folder_state}; set KVBOOST_HOME to another")
    if model in weights.BUNDLED and model not in weights.installed():
        advice.append(f"{model} is fetched and converted on first use: about a minute")
    packs = can_pack(chosen_device, chosen_dtype)
    if "compiler" in kernels:
        advice.append(
            "with gcc or clang installed, attention and decoding take our own kernels: answers "
            "come in about half the time"
        )
    facts: dict[str, str | int | bool] = {
        "kvboost": _version("kvboost"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        "gguf": _version("gguf"),
        "device": str(chosen_device),
        "dtype": str(chosen_dtype).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "packed weights": packs,
        "quantised weights": describe_path(chosen_device, chosen_dtype),
        "kernels": kernels,
        **_rates(),
        "memory": f"{memory / 1024**3:.1f} GiB" if memory else "unknown",
        "cache folder": str(home()),
        "cache folder is": folder_state,
        "models here": ", ".join(weights.installed()) or "none",
    }
    if kind.gpu is not None:
        facts["gpu"] = torch.cuda.get_device_name(kind.gpu)
        reason = why_no_pages(kind.gpu)
        facts["pages and graphs"] = f"no: {reason}" if reason else "yes"
        if reason:
            advice.append(
                f"decoding runs without pages and CUDA graphs, several times slower: {reason}"
            )
    return Findings(facts, advice)


def _rates() -> dict[str, str]:
    """The speed at which weights move, which decides how fast large models are."""
    found = bandwidths()
    rates = {
        "reading memory": found.ram,
        "reading disk": found.disk,
        "host to GPU": found.bus,
        "GPU memory": found.gpu,
    }
    return {name: f"{rate / 1e9:.1f} GB/s" for name, rate in rates.items() if rate is not None}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _folder_state() -> str:
    """Whether the cache folder, or the nearest folder above it that exists, can be written."""
    folder = home()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    if not folder.is_dir():
        return "not a folder"
    return "writable" if os.access(folder, os.W_OK) else "not writable"
