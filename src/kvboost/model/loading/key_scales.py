"""Keys that are scaled channel by channel after their rotation, as in Hunyuan.

Such a key cannot be rotated once more: the two channels of a pair have different scales. But keys
are only ever multiplied with queries, so the scales can go to the queries instead. A folded model
gives the same answers, and its keys rotate as those of other models do.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

FAMILIES = ("hunyuan_v1_dense", "hunyuan_v1_moe")
_OWN = "_kvboost_own_scales"


def identity(model: Any) -> dict[str, Any]:
    """The mark that tells the keys of a folded model from those that an engine with the model's own
    attention stores. Empty for other models."""
    return {"keys": "folded"} if model.config.model_type in FAMILIES else {}


def fold(model: Any) -> None:
    """Multiplies the scales of queries by those of keys, which become ones. Does nothing to a model
    of another family, or to one that is folded."""
    for attention in _attentions(model):
        if not hasattr(attention, _OWN):
            of_queries, of_keys = _scales(attention)
            setattr(attention, _OWN, (of_queries.data, of_keys.data))
            of_queries.data = of_queries.data * of_keys.data
            of_keys.data = torch.ones_like(of_keys.data)


def unfold(model: Any) -> None:
    """Gives a model that was folded its own scales again."""
    for attention in _attentions(model):
        if (own := getattr(attention, _OWN, None)) is not None:
            for scale, values in zip(_scales(attention), own, strict=True):
                scale.data = values.to(scale.device, scale.dtype)
            delattr(attention, _OWN)


def _attentions(model: Any) -> Iterator[nn.Module]:
    if model.config.model_type in FAMILIES:
        yield from (module for module in model.modules() if hasattr(module, "key_layernorm"))


def _scales(attention: Any) -> tuple[nn.Parameter, nn.Parameter]:
    return attention.query_layernorm.weight, attention.key_layernorm.weight
