"""How kinds of devices compute, as far as code that runs rows asks for it."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch

GRID = 64
"""For 16-bit numbers on a CPU, torch compiles a kernel for every number of rows and keys and keeps
them all. Hits end anywhere, so there would be ever more of them: sizes are rounded up to this."""
MOST_FLASH_DIM = 256
"""The widest heads of FlashAttention."""


@dataclass(frozen=True)
class Traits:
    """Those of a device that is neither of the two below. A shape of KV has the traits of its
    device, so they are chosen once, when a model is loaded."""

    is_host: bool = False
    """Whether its memory is the host's."""
    is_behind: bool = False
    """Whether it computes and copies while the host goes on."""
    grid: int = 1
    """Numbers of rows and keys of 16-bit numbers are rounded up to this."""
    most_dim: int = MOST_FLASH_DIM
    """The widest heads that torch's attention has kernels for, without copying keys for each query
    head."""
    takes_rows_in_parts: bool = False
    """Whether the kernel for attention in parts is the fastest for a single row."""
    knows_corners: bool = False
    """Whether there is a kernel for the causal mask of a sequence's last rows."""
    folds_masked: bool = False
    """Whether masked kernels know no grouped queries."""

    def wait(self, device: torch.device) -> None:
        """Returns when copies to ``device`` have ended: their memory may be written, or freed."""
        if self.is_behind:
            torch.cuda.synchronize(device)


CPU = Traits(is_host=True, grid=GRID, most_dim=sys.maxsize, takes_rows_in_parts=True)
NVIDIA = Traits(is_behind=True, knows_corners=True, folds_masked=True)


def traits_of(device: torch.device) -> Traits:
    return {"cpu": CPU, "cuda": NVIDIA}.get(device.type, Traits())
