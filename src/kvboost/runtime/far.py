"""Whether requests of an engine may have far rows, and in which memory."""

from __future__ import annotations

from pathlib import Path

from kvboost.cache.quantize import RowCodec
from kvboost.config import EngineConfig
from kvboost.errors import ConfigError
from kvboost.model.far.place import in_file, on_host
from kvboost.model.far.store import FarStore
from kvboost.model.load import LoadedModel

NEAR_SHARE = 2
"""A request with far rows gets this part of max_kv_bytes: other requests run beside it."""


def open_far(
    config: EngineConfig, model: LoadedModel, max_kv_bytes: int, refusal: str | None
) -> FarStore | None:
    """The far memory of an engine; None if it has none. Raises ConfigError if it is asked for and
    the model cannot use it. ``refusal``: why this engine has none."""
    if not config.far_kv_bytes:
        return None
    refusal = refusal or _why_not(model)
    if refusal:
        raise ConfigError(
            f"far_kv_bytes={config.far_kv_bytes:,} cannot be used: {refusal}; leave it at 0"
        )
    shape, near = model.forward.shape, max_kv_bytes // NEAR_SHARE
    if model.device.type == "cuda":
        codec = RowCodec(config.far_kv_bits) if config.far_kv_bits < 16 else None
        place, fits = on_host(shape, near, codec), slab_bytes(config, max_kv_bytes)
    elif config.far_kv_bits < 16:
        raise ConfigError(
            f"far_kv_bits={config.far_kv_bits} needs a model on a GPU; on a CPU, far rows are as "
            "the model computes them: leave it at 16"
        )
    else:
        folder = Path(config.far_kv_dir) if config.far_kv_dir is not None else None
        place, fits = in_file(shape, folder), max_kv_bytes
    return FarStore(shape, place, fits_bytes=fits, near_bytes=near, far_bytes=config.far_kv_bytes)


def slab_bytes(config: EngineConfig, max_kv_bytes: int) -> int:
    """The memory of pages on a GPU. Near rows of requests with far rows are not in pages."""
    return max_kv_bytes - max_kv_bytes // NEAR_SHARE if config.far_kv_bytes else max_kv_bytes


def _why_not(model: LoadedModel) -> str | None:
    if not model.forward.packed:
        return "this model keeps its own attention, which reads all rows from one place"
    if model.support.reuse_limit is not None:
        return (
            "this model's rotation depends on the prompt's length, so it must read a prompt in one "
            "piece"
        )
    if model.device.type not in ("cpu", "cuda"):
        return f"rows are copied to CPUs and NVIDIA GPUs only, not to {model.device.type!r}"
    if len({weight.device for weight in model.forward.model.parameters()}) > 1:
        return "the model is on several devices"
    return None
