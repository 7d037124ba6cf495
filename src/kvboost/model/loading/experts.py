"""Mixtures of experts: which part of their weights a token's row goes through."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from kvboost.model.quantized.experts import num_packed

NUMBERS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "top_k_experts")


def num_experts(text: Any) -> int | None:
    """The number of experts of a layer, from the config of a model's text part; None if it has
    none."""
    return _first(text, NUMBERS)


def chosen_share(config: Any) -> Fraction:
    """The share of the experts that a row is sent through; 1 if that is not known."""
    text = config.get_text_config()
    number, chosen = num_experts(text), _first(text, CHOSEN)
    return Fraction(min(chosen, number), number) if number and chosen else Fraction(1)


def idle_weights(model: Any, *, in_bytes: bool = False) -> int:
    """The number of a model's weights, or of their bytes, that a row does not go through: those of
    the experts that are not chosen for it."""
    found = num_packed(model, in_bytes=in_bytes)
    for name, weight in model.named_parameters():
        if ".experts." in name:
            found += weight.nbytes if in_bytes else weight.numel()
    return int(found * (1 - chosen_share(model.config)))


def _first(config: Any, names: tuple[str, ...]) -> int | None:
    """The value of the first of these fields that is a number."""
    values = (getattr(config, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)
