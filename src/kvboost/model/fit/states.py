"""The size of a model's states, by its config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig

from kvboost.model.loading.compat import ARCHITECTURES

WITH_ROWS = ("full_attention", "sliding_attention", "hybrid")
"""Types of layers that have keys and values."""
WITH_STATES = ("linear_attention", "conv", "hybrid")


def layers_with_rows(config: Mapping[str, Any]) -> int | None:
    """The number of layers with keys and values in a model of which some have states; None if its
    config does not say, and for other models."""
    kinds = _kinds(config)
    return sum(map(WITH_ROWS.__contains__, kinds)) or None


def state_numbers(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """The size of the states of a model's convolutions and recurrent layers, in numbers per text.
    ``config`` is the content of a config.json. None if it does not say, and for models without
    states."""
    kinds = _kinds(config)
    if not kinds:
        return None
    sizes = _layer_numbers(_full(config))
    layers = sum(map(WITH_STATES.__contains__, kinds))
    return None if sizes is None else (layers * sizes[0], layers * sizes[1])


def _full(config: Mapping[str, Any]) -> Any:
    """The config of the text part, with all defaults."""
    return AutoConfig.for_model(**config).get_text_config()


def _kinds(config: Mapping[str, Any]) -> list[str]:
    """The types of all layers; empty for models without states."""
    architecture = ARCHITECTURES.get(str(config.get("model_type")))
    if architecture is None or not architecture.states:
        return []
    return list(getattr(_full(config), "layer_types", None) or ())


def _layer_numbers(text: Any) -> tuple[int, int] | None:
    """Those of one layer. Names differ between families."""
    if hasattr(text, "linear_num_value_heads"):  # a gated delta rule
        keys = text.linear_num_key_heads * text.linear_key_head_dim
        values = text.linear_num_value_heads * text.linear_value_head_dim
        columns = (2 * keys + values) * text.linear_conv_kernel_dim
        return columns, values * text.linear_key_head_dim
    if hasattr(text, "conv_L_cache"):
        return text.hidden_size * text.conv_L_cache, 0
    width = _first(text, "mamba_d_conv", "conv_kernel")
    size = _first(text, "mamba_d_state", "ssm_state_size")
    if width is None or size is None:
        return None
    if hasattr(text, "mamba_dt_rank"):  # Mamba 1: a state for each channel
        channels = text.mamba_expand * text.hidden_size
        return channels * width, channels * size
    heads = _first(text, "mamba_n_heads", "n_mamba_heads", "mamba_num_heads")
    dim = _first(text, "mamba_d_head", "mamba_headdim", "mamba_head_dim")
    groups = _first(text, "mamba_n_groups", "mamba_ngroups", "n_groups")
    if heads is None or dim is None or groups is None:
        return None
    return (heads * dim + 2 * groups * size) * width, math.prod((heads, dim, size))


def _first(text: Any, *names: str) -> int | None:
    return next((int(getattr(text, name)) for name in names if hasattr(text, name)), None)
