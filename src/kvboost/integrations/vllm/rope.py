"""The rotation of keys of a model in vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvboost.errors import UnsupportedModelError
from kvboost.model.native.moved_rows import move_keys
from kvboost.reuse.rope import Rotation

_PLAIN = ("RotaryEmbedding", "Llama3RotaryEmbedding")
_BY_FACTOR = ("YaRNScalingRotaryEmbedding",)
_BY_DIVISOR = ("LinearScalingRotaryEmbedding",)


def rotation(model: torch.nn.Module, layers: Sequence[object]) -> Rotation:
    """The rotation of ``layers``, the attention layers of ``model``. Raises
    ``UnsupportedModelError`` if one cannot be told, or depends on the length of the prompt."""
    of_layer = _positions_of(model, layers)
    forms = {(one.rotary_dim, one.is_neox_style) for one in of_layer}
    if len(forms) != 1:
        raise UnsupportedModelError(f"its layers have {len(forms)} kinds of rotary positions")
    table = torch.stack([_frequencies(one) for one in of_layer])
    return Rotation(table, interleaved=not of_layer[0].is_neox_style, kernel=move_keys)


def _positions_of(model: torch.nn.Module, layers: Sequence[object]) -> list[Any]:
    """The modules that give each layer its rotary positions: any such module if all are alike, or
    the one that the block around the layer has as ``rotary_emb``."""
    every: list[Any] = [one for one in model.modules() if hasattr(one, "_compute_inv_freq")]
    if not every:
        raise UnsupportedModelError("it has no rotary positions that vLLM computes")
    kinds = {(one.is_neox_style, *_frequencies(one).tolist()) for one in every}
    if len(kinds) == 1:
        return every[:1] * len(layers)
    around: dict[int, Any] = {}
    for block in model.modules():  # the innermost comes last
        positions = getattr(block, "rotary_emb", None)
        if hasattr(positions, "_compute_inv_freq"):
            around |= dict.fromkeys(map(id, block.modules()), positions)
    if not all(id(layer) in around for layer in layers):
        raise UnsupportedModelError(
            f"it has {len(kinds)} kinds of rotary positions, and which layer has which is not known"
        )
    return [around[id(layer)] for layer in layers]


def _frequencies(positions: Any) -> torch.Tensor:
    """Radians for each position, by pair of channels."""
    name = type(positions).__name__
    if name in _PLAIN:
        found = positions._compute_inv_freq(positions.base)
    elif name in _BY_FACTOR:
        found = positions._compute_inv_freq(positions.scaling_factor)
    elif name in _BY_DIVISOR and len(positions.scaling_factors) == 1:
        found = positions._compute_inv_freq(positions.base) / positions.scaling_factors[0]
    else:
        raise UnsupportedModelError(f"its rotary positions ({name}) cannot be moved")
    table: torch.Tensor = found.detach().double().cpu()
    return table
