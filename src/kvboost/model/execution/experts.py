"""Mixtures of experts on a GPU: our kernels in the place of the products of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.integrations import moe

from kvboost.model import triton
from kvboost.model.execution.fast_layers import is_silu

NAME = "kvboost"
OWN = "_kvboost_own_experts"
"""An attribute of a module with experts: the implementation that its model has without us. It is
there so that every engine of the model finds it."""
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Experts:
    """The experts of a model, as ``bind`` leaves them to our kernels."""

    def __init__(self, model: Any) -> None:
        parts = [part for part in model.modules() if hasattr(part, "is_transposed")]
        self.are_known = bool(parts) and all(map(_is_plain, parts))
        # The first of those that share a configuration.
        self._parts = list({id(part.config): part for part in reversed(parts)}.values())

    @classmethod
    def of(cls, model: Any) -> Experts | None:
        """None if the model has none that our kernels know, or is not where they run."""
        if not triton.serves(model.device):
            return None
        experts = cls(model)
        if not experts.are_known:
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
        """Makes stock transformers' calls meanwhile."""
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
    from kvboost.model.triton.experts import Weights, mix

    up, down = (
        Weights(
            weight.transpose(1, 2) if module.is_transposed else weight,
            getattr(module, f"{name}_bias") if module.has_bias else None,
        )
        for name, weight in (("gate_up_proj", module.gate_up_proj), ("down_proj", module.down_proj))
    )
    return mix(rows, chosen, shares, up, down, gate).to(rows.dtype)


def _is_known(module: Any, rows: torch.Tensor) -> bool:
    """Our kernels compute no gradients."""
    plain = _is_plain(module) and not torch.is_grad_enabled()
    return plain and module.gate_up_proj.dtype == module.down_proj.dtype == rows.dtype


def _is_plain(module: Any) -> bool:
    weights = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    return (
        module.has_gate
        and not getattr(module, "has_post_expert_norm", False)
        and not getattr(module, "_is_expert_parallel", False)
        and all(type(each) is nn.Parameter and each.dtype in DTYPES for each in weights)
    )


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
