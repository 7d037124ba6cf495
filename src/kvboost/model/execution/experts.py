"""Mixtures of experts on a GPU: our kernels in the place of the products of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers.integrations import moe

from kvboost.model import triton
from kvboost.model.execution.fast_layers import is_silu
from kvboost.model.quantized.experts import DTYPES as PACKED_DTYPES
from kvboost.model.quantized.experts import PRODUCTS, PackedExperts

if TYPE_CHECKING:
    from kvboost.model.triton.experts import ExpertWeights

NAME = "kvboost"
OWN = "_kvboost_own_experts"
"""An attribute of a module with experts: the implementation that its model has without us. It is
there so that every engine of the model finds it."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Experts:
    """The experts of a model, as ``bind`` leaves them to our kernels."""

    def __init__(self, model: Any) -> None:
        parts = [part for part in model.modules() if hasattr(part, "is_transposed")]
        self.are_known = bool(parts) and all(map(_are_known, parts))
        self.are_packed = any(isinstance(part, PackedExperts) for part in parts)
        # The first of those that share a configuration.
        self._parts = list({id(part.config): part for part in reversed(parts)}.values())

    @classmethod
    def of(cls, model: Any, *, streams: bool = False) -> Experts | None:
        """None if the model has none that our kernels know, or is not where they run. If it
        ``streams`` its layers, plain experts are left to transformers."""
        if not triton.serves(model.device):
            return None
        experts = cls(model)
        if not experts.are_known or (streams and not experts.are_packed):
            return None
        moe.ALL_EXPERTS_FUNCTIONS.register(NAME, mixed)
        return experts

    def bind(self) -> None:
        for part in self._parts:
            if (own := part.config._experts_implementation) != NAME:
                setattr(part, OWN, own)
                part.config._experts_implementation_internal = NAME  # of no other part

    def release(self) -> None:
        for part in self._parts:
            if part.config._experts_implementation == NAME:
                part.config._experts_implementation_internal = vars(part).pop(OWN)

    @contextmanager
    def as_stock(self) -> Iterator[None]:
        """Makes stock transformers' calls meanwhile. It has none for packed weights."""
        if self.are_packed:
            yield
            return
        self.release()
        try:
            yield
        finally:
            self.bind()


def mixed(
    module: Any, rows: torch.Tensor, chosen: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """The output of the experts in ``module`` for ``rows``, as transformers asks for it. What our
    kernels do not know goes through transformers' usual products."""
    gate = _gate_of(module)
    if gate is None or not _is_known(module, rows):
        return moe.grouped_mm_experts_forward(module, rows, chosen, shares)
    from kvboost.model.triton.experts import mix

    up, down = (_weights_of(module, name) for name in PRODUCTS)
    return mix(rows, chosen, shares, up, down, gate).to(rows.dtype)


def _weights_of(module: Any, name: str) -> ExpertWeights:
    from kvboost.model.triton.experts import Weights
    from kvboost.model.triton.mxfp4 import PackedWeights

    bias = getattr(module, f"{name}_bias") if module.has_bias else None
    if isinstance(module, PackedExperts):
        packed = module.packed(name)
        return PackedWeights(packed.codes, packed.scales, packed.depth, bias)
    weight = getattr(module, name)
    return Weights(weight.transpose(1, 2) if module.is_transposed else weight, bias)


def _is_known(module: Any, rows: torch.Tensor) -> bool:
    """Our kernels compute no gradients."""
    if torch.is_grad_enabled() or not _are_known(module):
        return False
    if isinstance(module, PackedExperts):
        return rows.dtype in PACKED_DTYPES
    return bool(module.gate_up_proj.dtype == module.down_proj.dtype == rows.dtype)


def _are_known(module: Any) -> bool:
    return (
        module.has_gate
        and not getattr(module, "has_post_expert_norm", False)
        and not getattr(module, "_is_expert_parallel", False)
        and (isinstance(module, PackedExperts) or _are_plain(module))
    )


def _are_plain(module: Any) -> bool:
    weights = (getattr(module, name, None) for name in PRODUCTS)
    return all(type(each) is nn.Parameter and each.dtype in DTYPES for each in weights)


def _gate_of(module: Any) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """The function between the two products: one kernel for the most usual ones."""
    from kvboost.model.triton.experts import limited_gate
    from kvboost.model.triton.fused import gate

    apply = getattr(type(module), "_apply_gate", None)
    if apply is None:
        return None
    if apply is moe._default_apply_gate and is_silu(module):
        return gate
    if hasattr(module, "alpha") and hasattr(module, "limit") and not module.is_concatenated:
        return partial(limited_gate, alpha=module.alpha, limit=module.limit)
    return partial(apply, module)
