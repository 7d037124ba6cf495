"""The states of layers without rows, in vLLM's pages.

vLLM lays a layer's states out in tensors of which each has one state per page: what the layer holds
after the last row of the page, for pages at whose ends vLLM keeps it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvboost.errors import UnsupportedModelError
from kvboost.integrations.vllm.groups import Tables

Shape = tuple[torch.dtype, tuple[int, ...]]


class StatePages:
    """``layers`` has each layer with states, in the model's order: the number of its group, and its
    tensors, ``[pages, ...]``. States that are alike are stored in one tensor, in the same order
    whatever the groups are: ``[layers, ...]``."""

    def __init__(self, layers: Sequence[tuple[int, Sequence[torch.Tensor]]]) -> None:
        self._alike: dict[tuple[int, Shape], list[tuple[int, torch.Tensor]]] = {}
        for group, tensors in layers:
            if not tensors:
                raise UnsupportedModelError("a layer with states has none that KVBoost knows")
            for number, one in enumerate(tensors):
                if not one.is_floating_point() or one.dtype.itemsize < 2:
                    raise UnsupportedModelError(f"its states ({one.dtype}) are quantised")
                shape = one.dtype, tuple(one.shape[1:])
                self._alike.setdefault((number, shape), []).append((group, one))

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """The dtype and shape of each tensor that is stored."""
        return tuple(
            (dtype, (len(tensors), *shape)) for (_, (dtype, shape)), tensors in self._alike.items()
        )

    @property
    def nbytes(self) -> int:
        """The size of the states at one row."""
        return sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in self.shapes)

    def read(self, tables: Tables, page: int) -> list[torch.Tensor]:
        """Copies of the states at the end of the ``page``-th page of a request."""
        read = []
        for (_, (dtype, shape)), tensors in self._alike.items():
            copied = torch.empty((len(tensors), *shape), dtype=dtype, device=tensors[0][1].device)
            for out, (group, one) in zip(copied, tensors, strict=True):
                out.copy_(one[tables[group][page]])
            read.append(copied)
        return read

    def write(self, states: Sequence[torch.Tensor], tables: Tables, page: int) -> None:
        """Writes what :meth:`read` gave."""
        for stored, tensors in zip(states, self._alike.values(), strict=True):
            for one, (group, there) in zip(stored, tensors, strict=True):
                there[tables[group][page]].copy_(one, non_blocking=True)
