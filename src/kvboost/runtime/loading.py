"""Loading a model, on one device or on several ranks; the runtime that serves it, and what to tell
of both."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvboost.config import EngineConfig, format_bytes, whole
from kvboost.errors import ConfigError
from kvboost.model.loading.load import LoadedModel, load
from kvboost.model.loading.machine import memory_bytes
from kvboost.model.quantized.layers import num_weights, weights_of
from kvboost.model.streaming.plan import DeviceBudget
from kvboost.runtime.devices import device_of
from kvboost.runtime.runtime import Runtime

MakeRuntime = Callable[[LoadedModel, EngineConfig, Path | None], Runtime]


def load_model(
    name: str | os.PathLike[str],
    config: EngineConfig,
    *,
    strict: bool,
    device: str | torch.device | None,
    dtype: str | torch.dtype | None,
    tp_size: int,
    hub_options: Mapping[str, Any],
) -> tuple[LoadedModel, MakeRuntime]:
    """A model, and what makes its runtime."""
    _check(config, tp_size)
    if tp_size == 1:
        model = load(
            name,
            strict=strict,
            device=device,
            dtype=dtype,
            weight_form=config.weights,
            budget=DeviceBudget.of(config),
            **hub_options,
        )
        return model, Runtime
    # Not every build of torch has torch.distributed.
    from kvboost.runtime.parallel.runtime import ParallelRuntime, load_parallel, start_ranks

    ranks = start_ranks(name, tp_size, strict=strict, device=device, **hub_options)
    model = load_parallel(ranks, name, {"strict": strict, "dtype": dtype, **hub_options})
    return model, partial(ParallelRuntime, ranks)


def fill_in(config: EngineConfig, given: Collection[str], model: LoadedModel) -> EngineConfig:
    """``config`` with defaults that depend on the model's device, except for options ``given``."""
    device = device_of(model.device)
    usual: dict[str, Any] = {"max_running": device.max_running, "chunk_size": device.chunk_size}
    missing = {name: value for name, value in usual.items() if value and name not in given}
    return replace(config, **missing)


def _check(config: EngineConfig, tp_size: int) -> None:
    whole(tp_size, 1, "tp_size")
    if tp_size > 1 and config.device_memory is not None:
        raise ConfigError("device_memory streams the layers of one GPU; leave out tp_size")
    if tp_size > 1 and config.weights == "packed":
        raise ConfigError(
            f"weights='packed' is for one device, and tp_size is {tp_size}; use weights='plain'"
        )


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
