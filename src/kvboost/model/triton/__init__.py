"""Kernels in Triton for KV that lies in pages, as in vLLM on GPUs: attention of scattered rows,
moving stored rows into pages, attention mass and the shift. The modules of this room import triton;
the package does not, so it can be imported without it."""

from __future__ import annotations

from importlib.util import find_spec


def is_available() -> bool:
    """Whether the modules of this room can be imported."""
    return find_spec("triton") is not None
