"""All tensors of a decoder layer in one piece of memory, so that a layer is one copy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from kvboost.model.streaming.tensors import Place, replace_tensor, tensors_of

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
