"""The output head on our kernels, with the weights as the model has them.

The head is the largest product of a decode step, and often it is the embedding too, so no
rearranged copy is made of it. torch takes about as long for one row as our kernel does, and up to
twice as long for the few rows of a batch or a draft.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from kvboost.model import native

log = logging.getLogger("kvboost")

LANES = 16
"""The depth of a weight is a multiple of this."""
MOST_ROWS = 64
"""torch is about as fast for more rows than this."""
COMPARED = 40
"""Columns that show whether our product is the model's."""
ROUNDING = 1e-4


def multiply_plain(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """``rows @ weight.T`` in float32; ``weight`` is ``[n, k]`` and contiguous. The result for a row
    does not depend on the rows beside it."""
    rows = rows.contiguous()
    n, k = weight.shape
    out = rows.new_empty((*rows.shape[:-1], n))
    native.library(torch.float32).kvboost_plain_linear(
        *(rows.data_ptr(), rows.numel() // k, weight.data_ptr(), n, k, out.data_ptr()),
        torch.get_num_threads(),
    )
    return out


class Head:
    """The forward of an output head. It is ours only while ``is_on``: a request that makes the
    calls of stock transformers must get their results."""

    def __init__(self, linear: nn.Linear) -> None:
        self.is_on = False
        self._weight = linear.weight.detach()
        self._stock = linear.forward

    @contextmanager
    def turned(self, *, on: bool) -> Iterator[None]:
        """Turns it on or off for one forward."""
        before, self.is_on = self.is_on, on
        try:
            yield
        finally:
            self.is_on = before

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        if self.is_on and rows.numel() <= MOST_ROWS * rows.shape[-1]:
            return multiply_plain(rows, self._weight)
        return self._stock(rows)


def install_head(model: nn.Module) -> Head | None:
    """Makes our kernel run few rows of the model's output head; None if it does not fit."""
    linear = model.get_output_embeddings()  # type: ignore[operator]
    if type(linear) is not nn.Linear or not _fits(linear):
        return None
    generator = torch.Generator(device="cpu").manual_seed(0)
    rows = torch.randn(3, linear.in_features, generator=generator, device="cpu")
    part = linear.weight.detach()[:COMPARED]
    expected = nn.functional.linear(rows, part)
    far = float((multiply_plain(rows, part) - expected).abs().max() / expected.abs().max())
    if not far < ROUNDING:
        log.warning("our output head is off by %.5f; the model's own is left alone", far)
        return None
    head = Head(linear)
    vars(linear)["forward"] = head
    return head


def _fits(linear: nn.Linear) -> bool:
    weight = linear.weight
    return (
        linear.bias is None
        and weight.dtype == torch.float32
        and weight.is_contiguous()
        and linear.in_features % LANES == 0
        and native.is_available(torch.float32, weight.device)
    )
