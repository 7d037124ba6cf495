"""Attention of many consecutive rows, by the fastest kernel that torch has for the device.

Rows after a prefix attend in two parts: to the keys before them, which needs no mask, and to their
own keys, which is causal and square. Every kernel can do both, whatever it takes a causal mask of
another shape to mean. The parts are merged by their log-sum-exps.

cuDNN prepares a plan for every new shape, which takes longer than the attention itself. It gets
rows and keys in multiples of ``GRID`` only; what remains at both ends is left to our own kernel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import torch

from kvboost.model.execution.partial_attention import Part, flash, has_flash
from kvboost.model.execution.segment import round_up

log = logging.getLogger("kvboost")

GRID = 1024
ROUNDING = 2**-5
"""The largest distance of cuDNN's results from FlashAttention's, relative to the largest."""

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, bool], Part]
"""``attend(query, keys, values, scale, causal)``, all ``[1, heads, rows, dim]``, with fewer heads
of keys than of queries if these are grouped. ``causal`` attention has as many keys as queries."""


@dataclass(frozen=True)
class LongKernel:
    """A kernel of torch's. It takes rows and keys in multiples of ``grid``, and is the fastest from
    ``least_rows`` rows on."""

    name: str
    attend: Attend
    grid: int
    least_rows: int

    def cut(self, first: int, end: int) -> range | None:
        """The positions of ``[first, end)`` that it should compute; None if there are too few."""
        rows = range(round_up(first, self.grid), end // self.grid * self.grid)
        return rows if len(rows) >= self.least_rows else None


def _cudnn(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool
) -> Part:
    run = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, sums, *_ = run(query, keys, values, None, True, 0.0, causal, False, scale=scale)
    return out, sums.reshape(query.shape[:3])  # some versions keep a last dimension of 1


FLASH = LongKernel("FlashAttention", flash, grid=1, least_rows=256)
CUDNN = LongKernel("cuDNN", _cudnn, grid=GRID, least_rows=2 * GRID)


@cache
def long_kernels(
    device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int
) -> Sequence[LongKernel]:
    """The kernels for queries and keys of this shape, the fastest first: cuDNN on GPUs that it is
    faster on (Hopper, Blackwell), then FlashAttention."""
    if not has_flash(device, dtype, dim):
        return ()
    has_cudnn = (
        torch.cuda.get_device_capability(device)[0] in (9, 10)
        and torch.backends.cudnn.is_available()
        and dim <= 128
    )
    if has_cudnn and _agree(device, dtype, heads, kv_heads, dim):
        return (CUDNN, FLASH)
    return (FLASH,)


def _agree(device: torch.device, dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether cuDNN runs here, and gives what FlashAttention gives."""
    generator = torch.Generator(device).manual_seed(0)
    query, keys, values = (
        torch.randn(1, number, GRID, dim, generator=generator, device=device).to(dtype)
        for number in (heads, kv_heads, kv_heads)
    )
    try:
        for causal in (False, True):
            found, expected = (
                kernel.attend(query, keys, values, dim**-0.5, causal) for kernel in (CUDNN, FLASH)
            )
            for ours, theirs in zip(found, expected, strict=True):
                far = float((ours.float() - theirs.float()).abs().max() / theirs.abs().max())
                if not far < ROUNDING:
                    log.warning("cuDNN's attention is off by %.3f; FlashAttention is used", far)
                    return False
    except RuntimeError as error:
        reason = str(error).partition("\n")[0]
        log.warning("cuDNN's attention does not run here (%s); FlashAttention is used", reason)
        return False
    return True
