"""Whether requests have their KV in pages, and whether their decode steps become CUDA graphs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kvboost.model import triton
from kvboost.model.paged.graphs import MEMORY_SHARE, Capture, GraphCapture, NoCapture

if TYPE_CHECKING:
    from kvboost.model.forward import Forward


def why_buffers(forward: Forward) -> str:
    """Why requests of a model have buffers of their own; empty if they have pages. Pages need our
    attention, a GPU that Triton's kernels run on, and a model in one piece."""
    if len({weight.device for weight in forward.model.parameters()}) != 1:
        return "the model is on several devices"
    own = "" if forward.packed else "the model keeps its own attention"
    return why_no_pages(forward.shape.device) or own


def why_no_pages(device: torch.device) -> str:
    """Why no model on this device has pages; empty if one can."""
    if device.type != "cuda":
        return "only on NVIDIA GPUs"
    if not triton.is_available():
        return "triton is not installed"
    if torch.version.cuda is None or torch.cuda.get_device_capability(device) < (8, 0):
        return "only on NVIDIA GPUs of compute capability 8.0 and later"
    return ""


def make_capture(device: torch.device, graphs: str, memory: int | None = None) -> Capture:
    """``graphs`` is the option of that name; ``memory`` is what the engine may take of the
    device's, None: all."""
    if device.type != "cuda":
        return NoCapture("CUDA graphs need a GPU")
    if graphs == "off":
        return NoCapture("graphs='off'")
    return GraphCapture(device, None if memory is None else int(memory * MEMORY_SHARE))
