"""Loading a model, on one device or on several ranks, and the runtime that serves it."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvboost.config import EngineConfig, whole
from kvboost.errors import ConfigError
from kvboost.model.loading.load import LoadedModel, load
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
