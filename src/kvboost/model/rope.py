"""The RoPE frequencies of a loaded model, as its own rotary embedding holds them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from kvboost.errors import UnsupportedModelError
from kvboost.model.compat import Positions, Support


def frequencies(
    model: PreTrainedModel, support: Support, layers: Iterable[int]
) -> list[torch.Tensor] | None:
    """``[pairs]`` for each of the model's ``layers``, zeros for those without positions; None where
    positions are not rotary."""
    if support.architecture.positions is not Positions.ROPE:
        return None
    config = model.config.get_text_config()
    parts = model.get_decoder().named_modules()  # a vision tower may have one of its own
    rotary = [module for name, module in parts if name.split(".")[-1] == "rotary_emb"]
    if len(rotary) != 1:
        raise UnsupportedModelError(
            f"{type(model).__name__} has {len(rotary)} rotary embeddings; KVBoost knows models "
            "with one. strict=False with another model type gives exact prefix reuse"
        )
    buffers = dict(rotary[0].named_buffers())
    kinds = getattr(config, "layer_types", None)
    rotated = getattr(config, "no_rope_layers", None)
    found = []
    for layer in layers:
        kind = kinds[layer] if kinds else ""
        # Gemma 3 has a RoPE per kind of layer. Where long prompts change the frequencies, the
        # original ones rotate short prompts.
        names = (f"{kind}_original_inv_freq", "original_inv_freq", "inv_freq")
        inverse = next(buffers[name] for name in names if name in buffers)
        rotates = rotated[layer] if rotated else True
        inverse = inverse.detach().double().cpu()
        found.append(inverse if rotates else torch.zeros_like(inverse))
    return found
