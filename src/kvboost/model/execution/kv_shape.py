"""The shape of one token's keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from kvboost.model.execution.traits import Traits, traits_of


@dataclass(frozen=True)
class KVShape:
    """The shape of one token's KV in layers that are all alike."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    sides: int = 2
    """2: keys and values. 1: one row that serves as both, as the latents of MLA do."""

    @cached_property
    def traits(self) -> Traits:
        """Those of its device."""
        return traits_of(self.device)

    @property
    def grid(self) -> int:
        """Numbers of rows and keys are rounded up to this."""
        return self.traits.grid if self.dtype.itemsize == 2 else 1

    @property
    def row_bytes(self) -> int:
        heads = self.num_layers * self.num_kv_heads
        return self.sides * heads * self.head_dim * self.dtype.itemsize

    @property
    def key_channels(self) -> int:
        """The channels of a query head in all layers together."""
        return self.num_layers * self.head_dim

    @property
    def groups(self) -> tuple[KVShape, ...]:
        """As those of :class:`MixedShape`: there is one."""
        return (self,)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        return tuple((0, layer) for layer in range(self.num_layers))

    def of(self, layer: int) -> KVShape:
        """The shape of the layers like ``layer``."""
        return self

    def allocate(self, num_tokens: int) -> torch.Tensor:
        """Memory for ``num_tokens`` rows of finite numbers: a mask does not hide NaN."""
        size = (self.sides, self.num_layers, self.num_kv_heads, num_tokens, self.head_dim)
        if not self.traits.is_host:
            return torch.zeros(size, dtype=self.dtype, device=self.device)
        # The system provides zeros page by page, on first touch; torch would touch every page now.
        return torch.from_numpy(
            np.zeros((*size[:-1], size[-1] * self.dtype.itemsize), np.uint8)
        ).view(self.dtype)


@dataclass(frozen=True)
class MixedShape:
    """The shape of one token's KV in a model whose layers differ: groups of layers that are
    alike."""

    groups: tuple[KVShape, ...]
    places: tuple[tuple[int, int], ...]
    """For each layer its group, and its number in that group."""

    @property
    def num_layers(self) -> int:
        return len(self.places)

    @property
    def dtype(self) -> torch.dtype:
        return self.groups[0].dtype

    @property
    def device(self) -> torch.device:
        return self.groups[0].device

    @property
    def traits(self) -> Traits:
        return self.groups[0].traits

    @property
    def grid(self) -> int:
        return self.groups[0].grid

    @property
    def row_bytes(self) -> int:
        return sum(group.row_bytes for group in self.groups)

    @property
    def key_channels(self) -> int:
        return sum(group.key_channels for group in self.groups)

    def of(self, layer: int) -> KVShape:
        return self.groups[self.places[layer][0]]


AnyShape = KVShape | MixedShape


def shape_of(layers: list[torch.Tensor], sides: int = 2) -> AnyShape:
    """The shape of layers whose keys of one token, ``[1, kv_heads, 1, head_dim]``, are given."""
    kinds: dict[tuple[int, int], list[int]] = {}
    for number, keys in enumerate(layers):
        kinds.setdefault((keys.shape[1], keys.shape[3]), []).append(number)
    like = layers[0]
    groups = tuple(
        KVShape(len(members), heads, dim, like.dtype, like.device, sides)
        for (heads, dim), members in kinds.items()
    )
    if len(groups) == 1:
        return groups[0]
    places = {
        layer: (group, number)
        for group, members in enumerate(kinds.values())
        for number, layer in enumerate(members)
    }
    return MixedShape(groups, tuple(places[layer] for layer in range(len(layers))))
