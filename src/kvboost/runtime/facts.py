"""What an engine runs, and on what: for people who look at a server."""

from __future__ import annotations

import os
from typing import Any

from kvboost.config import EngineConfig, format_bytes
from kvboost.model.loading.load import LoadedModel
from kvboost.model.loading.machine import memory_bytes
from kvboost.model.quantized.layers import num_weights, weights_of
from kvboost.runtime.devices import device_of


def facts_of(model: LoadedModel, config: EngineConfig) -> dict[str, Any]:
    """The model, the device and the options that decide what an answer costs. No paths and no
    addresses: whoever may see the counts of a server may see this."""
    shape = model.forward.shape
    placement = model.placement
    return {
        "architecture": type(model.forward.model).__name__,
        "parameters": num_weights(model.forward.model)
        + (0 if placement is None else placement.host_weights),
        "weights": weights_of(model.forward.model),
        "layers": int(model.forward.model.config.get_text_config().num_hidden_layers),
        "dtype": str(shape.dtype).removeprefix("torch."),
        "device": str(model.device),
        **device_of(model.device).facts(shape.dtype),
        "memory_bytes": memory_bytes(),
        "device_memory": config.device_memory,
        "streamed_layers": 0 if placement is None else len(placement.plan.streamed),
        "streamed_from_disk": 0 if placement is None else len(placement.plan.on_disk),
        "kv_bytes_per_token": shape.row_bytes,
        "kv_cache_bits": 16 if model.forward.keeps_latents else config.kv_cache_bits,
        "state_bytes": model.forward.states.nbytes,
        "chunk_size": config.chunk_size,
        "heal": config.heal,
        "recompute_strategy": config.recompute_strategy,
    }


def describe(model: LoadedModel, config: EngineConfig, *, is_closed: bool) -> str:
    """An engine in one line."""
    dtype = str(model.forward.shape.dtype).removeprefix("torch.")
    return f"KVBoost({model.name!r}, {model.device}, {dtype}, {_tiers(config, is_closed)})"


def _tiers(config: EngineConfig, is_closed: bool) -> str:
    if is_closed:
        return "closed"
    tiers = [f"{format_bytes(config.max_cache_bytes)} in memory"]
    if config.disk_cache_dir is not None:
        size = format_bytes(config.disk_cache_bytes)
        tiers.append(f"{size} in {os.fspath(config.disk_cache_dir)!r}")
    if config.remote_cache_url is not None:
        tiers.append("a remote store")  # its address may hold a password
    return f"cache: {', '.join(tiers)}"
