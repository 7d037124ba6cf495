"""A model that is split over several ranks, by transformers' tensor-parallel plans.

Every rank is a process with a device of its own. It holds some heads of every layer and computes
their keys, values and attention; after every layer the ranks add up what they have computed. So all
ranks run the same forwards at the same time.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.distributed.configuration_utils import DistributedConfig

from kvboost.errors import ConfigError, UnsupportedModelError
from kvboost.model.execution.fast_layers import FastLayers
from kvboost.model.execution.forward import Forward
from kvboost.model.loading.compat import check
from kvboost.model.loading.device import pick_split_device
from kvboost.model.loading.load import LoadedModel, read, read_config, wrap

UNLIKE = ("gemma3n_text", "gemma4_text")
"""Model types whose layers have KV of several shapes, or read that of others. transformers' plan
for Gemma 3n also splits rows whose mean a layer needs, so its answers would be others."""


class PartForward(Forward):
    """The forward of one rank. Our attention kernels see only this rank's heads, as they would see
    a smaller model."""

    def _install_layers(self, packed: FastLayers) -> None:
        """Leaves the model's layers alone: ours would not add up what the ranks compute."""


def check_split(
    name: str | os.PathLike[str],
    tp_size: int,
    *,
    strict: bool,
    device: str | torch.device | None = None,
    **hf_kwargs: Any,
) -> torch.device:
    """Raises an error if ``tp_size`` ranks cannot serve the model; loads no weights. Returns the
    kind of device they run on."""
    for option in ("device_map", "gguf_file", "quantization_config"):
        if hf_kwargs.get(option) is not None:
            raise ConfigError(f"{option} and tp_size={tp_size} exclude each other; leave one out")
    if os.fspath(name).endswith(".gguf"):
        raise ConfigError(
            f"tp_size={tp_size}: a GGUF file cannot be split; use tp_size=1 or a model folder"
        )
    config = read_config(name, strict=strict, **hf_kwargs)
    _check_architecture(config, tp_size, strict=strict)
    _check_heads(name, config, tp_size)
    return pick_split_device(device, tp_size)


def _check_architecture(config: PretrainedConfig, tp_size: int, *, strict: bool) -> None:
    text = config.get_text_config()
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            f"tp_size={tp_size}: the weights of this model are quantised, and KVBoost splits only "
            "weights of 16 or 32 bits; use tp_size=1"
        )
    if not getattr(text, "base_model_tp_plan", None):
        raise UnsupportedModelError(
            f"tp_size={tp_size}: transformers has no tensor-parallel plan for model type "
            f"{config.model_type!r}; use tp_size=1"
        )
    support = check(config, strict=strict)
    if support.architecture.latent:
        raise UnsupportedModelError(
            f"tp_size={tp_size}: model type {config.model_type!r} keeps latents, which all heads "
            "share, and KVBoost splits heads; use tp_size=1"
        )
    if text.model_type in UNLIKE:
        raise UnsupportedModelError(
            f"tp_size={tp_size}: the KV of the layers of model type {config.model_type!r} differs, "
            "and KVBoost splits only models in which it is alike; use tp_size=1"
        )
    if not support.packed:
        raise UnsupportedModelError(
            f"tp_size={tp_size}: model type {config.model_type!r} keeps its own attention, which "
            "KVBoost does not split; use tp_size=1"
        )


def _check_heads(name: str | os.PathLike[str], config: PretrainedConfig, tp_size: int) -> None:
    heads, queries = num_kv_heads(config), int(config.get_text_config().num_attention_heads)
    allowed = [n for n in range(1, heads + 1) if heads % n == queries % n == 0]
    if tp_size not in allowed:
        raise ConfigError(
            f"tp_size={tp_size} does not divide the {heads} KV heads of {os.fspath(name)}, and a "
            f"rank holds whole heads; use one of {', '.join(map(str, allowed))}"
        )


def num_kv_heads(config: PretrainedConfig) -> int:
    """The KV heads of the whole model."""
    text = config.get_text_config()
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def load_part(
    name: str | os.PathLike[str],
    tp_size: int,
    *,
    strict: bool,
    dtype: str | torch.dtype | None = None,
    make_forward: Callable[..., PartForward] = PartForward,
    **hf_kwargs: Any,
) -> LoadedModel:
    """This rank's part of a model. All ranks must load it at the same time, after torch's process
    group has been set up."""
    model, tokenizer = read(
        name,
        strict=strict,
        dtype=dtype,
        distributed_config=DistributedConfig(tp_size=tp_size, tp_plan="auto"),
        **hf_kwargs,
    )
    loaded = wrap(model, tokenizer, name=os.fspath(name), strict=strict, make_forward=make_forward)
    loaded = replace(loaded, vision=f"tp_size={tp_size}: images need tp_size=1")
    here, whole = loaded.forward.uniform_shape.num_kv_heads, num_kv_heads(model.config)
    if here not in (whole, whole // tp_size):
        raise UnsupportedModelError(
            f"tp_size={tp_size}: transformers gives a rank {here} of the {whole} KV heads of "
            f"{os.fspath(name)}; KVBoost needs {whole // tp_size}, or all; use tp_size=1"
        )
    return loaded
