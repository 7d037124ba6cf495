"""A request's keys and values in a model whose layers differ: a buffer for each group of layers
that are alike."""

from __future__ import annotations

import torch

from kvboost.model.execution.kv import KVPool, Prefix, RequestKV, SharedRows
from kvboost.model.execution.kv_shape import AnyShape, MixedShape
from kvboost.model.execution.partial_attention import Part


class SharedGroups(Prefix):
    """The first rows of all groups."""

    is_far = False

    def __init__(self, groups: tuple[SharedRows, ...], shape: MixedShape) -> None:
        super().__init__(groups[0].count)
        self.groups = groups
        self._places = shape.places
        self._shorter: dict[int, SharedGroups] = {}
        self._shape = shape

    def first(self, count: int) -> SharedGroups:
        """The first ``count`` of them; every call returns the same object."""
        if count >= self.count:
            return self
        if count not in self._shorter:
            some = tuple(group.first(count) for group in self.groups)
            self._shorter[count] = SharedGroups(some, self._shape)
        return self._shorter[count]

    def attend(self, layer: int, query: torch.Tensor, scale: float) -> Part:
        """As :meth:`SharedRows.attend`."""
        group, number = self._places[layer]
        return self.groups[group].attend(number, query, scale)


class MixedKV(RequestKV):
    """``groups`` have the rows of their layers. What needs all rows in one tensor goes through
    the groups, one by one."""

    shape: MixedShape  # type: ignore[assignment]

    def __init__(self, shape: MixedShape, num_tokens: int) -> None:
        self.shape = shape
        self._groups = tuple(RequestKV(group, num_tokens) for group in shape.groups)
        self._shared: SharedGroups | None = None

    @property
    def groups(self) -> tuple[RequestKV, ...]:
        return self._groups

    @property
    def base(self) -> SharedGroups | None:  # type: ignore[override]
        return self._shared

    @property
    def start(self) -> int:  # type: ignore[override]
        return self.groups[0].start

    @property
    def capacity(self) -> int:
        return self.groups[0].capacity

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    @property
    def is_lent_on(self) -> bool:
        return self.groups[0].is_lent_on

    def attach_prefix(self, base: SharedGroups | None) -> None:  # type: ignore[override]
        self._shared = base
        for number, group in enumerate(self.groups):
            group.attach_prefix(None if base is None else base.groups[number])
        self.adapter = self.states = None

    def share(self, count: int) -> SharedGroups:  # type: ignore[override]
        if self._shared is None or (self.start == 0 and count > self._shared.count):
            self._shared = SharedGroups(
                tuple(group.share(count) for group in self.groups), self.shape
            )
        return self._shared.first(count)

    def detach_prefix(self) -> None:
        self._shared = None
        for group in self.groups:
            group.detach_prefix()

    def reserve(self, num_tokens: int) -> None:
        for group in self.groups:
            group.reserve(num_tokens)

    def rows(self, start: int, end: int) -> torch.Tensor:
        raise AssertionError("rows of layers that differ are in no single tensor")

    def clear(self, start: int, end: int) -> None:
        for group in self.groups:
            group.clear(start, end)

    def memory(self) -> dict[int, int]:
        held: dict[int, int] = {}
        for group in self.groups:
            held |= group.memory()
        if self.states is not None:
            held[id(self.states)] = self.states.nbytes
        return held

    @property
    def spared_bytes(self) -> int:
        return sum(group.spared_bytes for group in self.groups)

    def write(
        self, layer: int, positions: range | torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        group, number = self._place(layer)
        group.write(number, positions, keys, values)

    def layer(self, layer: int, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        group, number = self._place(layer)
        return group.layer(number, start, end)

    def _place(self, layer: int) -> tuple[RequestKV, int]:
        group, number = self.shape.places[layer]
        return self.groups[group], number


def make_kv(shape: AnyShape, num_tokens: int) -> RequestKV:
    """KV of this shape."""
    kind = RequestKV if len(shape.groups) == 1 else MixedKV
    return kind(shape, num_tokens)  # type: ignore[arg-type]


def make_pool(shape: AnyShape, max_idle: int) -> KVPool:
    """The pool that lends KV of this shape."""
    return KVPool(shape, max_idle, make=make_kv)  # type: ignore[arg-type]
