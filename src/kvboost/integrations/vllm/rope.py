"""The rotation of keys of a model in vLLM."""

from __future__ import annotations

from typing import Any

import torch

from kvboost.errors import UnsupportedModelError
from kvboost.model.native.moved_rows import move_keys
from kvboost.reuse.rope import Rotation

_PLAIN = ("RotaryEmbedding", "Llama3RotaryEmbedding")
_BY_FACTOR = ("YaRNScalingRotaryEmbedding",)


def rotation(model: torch.nn.Module, num_layers: int) -> Rotation:
    """The rotation of all layers. Raises ``UnsupportedModelError`` if they do not rotate alike, or
    in a way that depends on the length of the prompt."""
    found: dict[int, Any] = {
        id(one): one for one in model.modules() if hasattr(one, "_compute_inv_freq")
    }
    kinds = {
        (type(one).__name__, one.rotary_dim, one.base, one.is_neox_style) for one in found.values()
    }
    if len(kinds) != 1:
        raise UnsupportedModelError(f"its layers have {len(kinds)} kinds of rotary positions")
    one = next(iter(found.values()))
    name = type(one).__name__
    if name in _PLAIN:
        frequencies = one._compute_inv_freq(one.base)
    elif name in _BY_FACTOR:
        frequencies = one._compute_inv_freq(one.scaling_factor)
    else:
        raise UnsupportedModelError(f"its rotary positions ({name}) cannot be moved")
    table = frequencies.detach().double().cpu().expand(num_layers, -1).contiguous()
    return Rotation(table, interleaved=not one.is_neox_style, kernel=move_keys)
