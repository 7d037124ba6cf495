"""Kernels in Triton for KV that lies in pages, as in vLLM on GPUs: attention of scattered rows,
moving stored rows into pages, attention mass and the shift. The modules of this package import
triton; its ``__init__`` does not, so the package can be imported without it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def is_available() -> bool:
    """Whether the modules of this package can be imported."""
    return find_spec("triton") is not None


def serves(device: torch.device) -> bool:
    """Whether its kernels run on ``device``."""
    return device.type == "cuda" and is_available()
