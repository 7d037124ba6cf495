"""Whether requests have their KV in pages, and whether their decode steps become CUDA graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvboost.model import triton
from kvboost.model.paged.graphs import MEMORY_SHARE, Capture, GraphCapture, NoCapture


@dataclass(frozen=True)
class PagesChoice:
    """``reason``: why requests have buffers of their own; empty if they have pages."""

    reason: str = ""

    @property
    def used(self) -> bool:
        return not self.reason


def choose_pages(packed: bool, model: torch.nn.Module) -> PagesChoice:
    """Pages need our attention, a GPU that Triton's kernels run on, and a model in one piece."""
    devices = {weight.device for weight in model.parameters()}
    if len(devices) != 1:
        return PagesChoice("the model is on several devices")
    device = next(iter(devices))
    reason = why_no_pages(device)
    if not reason and not packed:
        reason = "the model keeps its own attention"
    return PagesChoice(reason)


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
