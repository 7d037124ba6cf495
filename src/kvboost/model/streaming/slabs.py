"""All tensors of a decoder layer in one piece of memory, so that a layer is one copy."""

from __future__ import annotations

import contextlib
import logging
import mmap
import sys
from dataclasses import dataclass

import torch
from torch import nn

from kvboost.model.streaming.tensors import Place, replace_tensor, tensors_of

log = logging.getLogger("kvboost")

ALIGNMENT = 256
"""Every tensor begins at a multiple of this: what GPU kernels may assume."""


@dataclass(frozen=True)
class _Part:
    """A tensor of a layer, and where it is in the slab. The layer may have it at several places."""

    places: tuple[Place, ...]
    tensor: torch.Tensor
    start: int
    end: int

    def view(self, slab: torch.Tensor) -> torch.Tensor:
        return slab[self.start : self.end].view(self.tensor.dtype).view(self.tensor.shape)


class SlabLayout:
    """Where the tensors of a layer are in its slab, whatever their types."""

    def __init__(self, layer: nn.Module) -> None:
        self._parts: list[_Part] = []
        self.num_bytes = 0
        for tensor, places in _distinct(layer):
            start = self.num_bytes
            end = start + tensor.nbytes
            self._parts.append(_Part(tuple(places), tensor, start, end))
            self.num_bytes = aligned(end)

    def save(self, slab: torch.Tensor) -> None:
        """Copies the layer's tensors into ``slab``, uint8 ``[num_bytes]``."""
        with torch.no_grad():
            for part in self._parts:
                part.view(slab).copy_(part.tensor)

    def bind(self, slab: torch.Tensor) -> None:
        """Makes the layer's tensors views of ``slab``. Whoever fills it fills the layer."""
        for part in self._parts:
            for place in part.places:
                replace_tensor(place, part.view(slab))
        self._parts = []  # frees the tensors that the layer had


def _distinct(layer: nn.Module) -> list[tuple[torch.Tensor, list[Place]]]:
    """Each tensor with all of its places."""
    found: dict[int, tuple[torch.Tensor, list[Place]]] = {}
    for place, tensor in tensors_of(layer).items():
        found.setdefault(id(tensor), (tensor, []))[1].append(place)
    return list(found.values())


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def layer_bytes(layer: nn.Module) -> int:
    """The memory of a layer's tensors as they are now, each counted once."""
    return SlabLayout(layer).num_bytes


class _Pages(mmap.mmap):
    """Memory of the process that nothing else uses. CUDA forgets it before it is freed."""

    registered_at: int | None = None

    def __del__(self) -> None:
        if self.registered_at is not None and not sys.is_finalizing():
            torch.cuda.cudart().cudaHostUnregister(self.registered_at)


def host_slab(num_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 ``[num_bytes]`` in host memory that ``device`` reads without a detour. Its size is
    exact: ``pin_memory`` would round it up to a power of two."""
    private = getattr(mmap, "MAP_PRIVATE", None)
    if private is None:  # Windows
        pages = _Pages(-1, num_bytes)
    else:
        pages = _Pages(-1, num_bytes, flags=private | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without huge pages
                pages.madvise(mmap.MADV_HUGEPAGE)
    slab = torch.frombuffer(pages, dtype=torch.uint8)
    if device.type == "cuda":
        _register(pages, slab)
    return slab


def _register(pages: _Pages, slab: torch.Tensor) -> None:
    """Locks the slab's pages in memory until they are freed. Without that, copies of it are several
    times slower and wait for the host."""
    status = int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.nbytes, 0))
    if status == 0:
        pages.registered_at = slab.data_ptr()
        return
    log.warning(
        "%s bytes of layers could not be registered with CUDA (error %d): copies of them will be "
        "slow; raise the limit of locked memory (ulimit -l)",
        f"{slab.nbytes:,}",
        status,
    )
