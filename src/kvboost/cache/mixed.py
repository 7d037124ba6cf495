"""Stored keys and values of models whose layers differ.

Layers of one shape are a group, and each group is stored as all layers of a plain model are
(``cache/quantize.py``): the tensors of the first group keep their names, those of group ``n`` are
called ``kv.n``, ``keys.n`` and so on. Layers that fold all text into a state have no rows. What
they hold after a chunk's last token may be stored with it, as ``state.0``, ``state.1`` ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from kvboost.cache.quantize import PLAIN, KVData, KVFormat

STATE = "state"


@dataclass(frozen=True)
class MixedFormat:
    """The format in which the chunks of such a model are stored. A chunk has all states or none."""

    groups: tuple[KVFormat, ...]
    states: tuple[tuple[torch.dtype, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, bits: int, tensors: Mapping[str, torch.Tensor]) -> MixedFormat | None:
        """The format that these tensors seem to have, for when no model is at hand."""
        data = KVData(bits, tensors)
        groups = [
            KVFormat.of(bits_of(some, bits), some) for some in _groups(tensors, num_groups(data))
        ]
        found = tuple((one.dtype, tuple(one.shape)) for one in states_of(data))
        known = tuple(group for group in groups if group is not None)
        return cls(known, found) if len(known) == len(groups) else None

    def describes(
        self, bits: int, num_tokens: int, position: int, tensors: Mapping[str, torch.Tensor]
    ) -> bool:
        """As :meth:`KVFormat.describes`."""
        data = KVData(bits, tensors)
        states = states_of(data)
        groups = _groups(tensors, len(self.groups))
        if sum(map(len, groups)) + len(states) != len(tensors):
            return False
        found = tuple((one.dtype, tuple(one.shape)) for one in states)
        return found in ((), self.states) and all(
            format.describes(bits_of(some, bits), num_tokens, position, some)
            for format, some in zip(self.groups, groups, strict=True)
        )

    def most_bytes(self, num_tokens: int, position: int) -> int:
        """As :meth:`KVFormat.most_bytes`."""
        of_states = sum(dtype.itemsize * torch.Size(shape).numel() for dtype, shape in self.states)
        return of_states + sum(group.most_bytes(num_tokens, position) for group in self.groups)


AnyFormat = KVFormat | MixedFormat


def format_of(bits: int, tensors: Mapping[str, torch.Tensor]) -> AnyFormat | None:
    """The format that these tensors seem to have, for when no model is at hand."""
    return KVFormat.of(bits, tensors) if is_plain(tensors) else MixedFormat.of(bits, tensors)


def is_plain(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Whether these are keys and values of layers that are alike, and nothing else."""
    full = tensors.get(PLAIN)
    return not any("." in name for name in tensors) and (full is None or full.shape[:1] == (2,))


def join_groups(groups: Sequence[KVData], states: Sequence[torch.Tensor] = ()) -> KVData:
    """One chunk's data of that of its groups."""
    tensors = {
        _named(name, number): one
        for number, group in enumerate(groups)
        for name, one in group.tensors.items()
    }
    bits = min(group.bits for group in groups)
    return with_states(KVData(bits, tensors), states)


def with_states(data: KVData, states: Sequence[torch.Tensor]) -> KVData:
    """``data`` of rows, together with the states after the last of them."""
    tensors = {**data.tensors, **{f"{STATE}.{number}": one for number, one in enumerate(states)}}
    return KVData(data.bits, tensors)


def without_states(data: KVData) -> KVData:
    """The rows of ``data`` alone."""
    tensors = {name: one for name, one in data.tensors.items() if name.partition(".")[0] != STATE}
    return KVData(data.bits, tensors)


def num_groups(data: KVData) -> int:
    """The number of groups of layers in ``data``."""
    names = (name.partition(".") for name in data.tensors)
    numbers = (number for stem, _, number in names if stem != STATE)
    return 1 + max((int(number) for number in numbers if _is_number(number)), default=0)


def group_of(data: KVData, number: int) -> KVData:
    """One group's part of ``data``, as that of a plain model."""
    tensors = _groups(data.tensors, number + 1)[number]
    return KVData(bits_of(tensors, data.bits), tensors)


def states_of(data: KVData) -> list[torch.Tensor]:
    """The states of layers without rows after the last token; empty if not stored."""
    found: list[torch.Tensor] = []
    if data.in_pages:  # they hold rows only, and to ask for tensors would copy them
        return found
    while (one := data.tensors.get(f"{STATE}.{len(found)}")) is not None:
        found.append(one)
    return found


def bits_of(tensors: Mapping[str, torch.Tensor], bits: int) -> int:
    """The precision of one group, in a chunk of ``bits``: some groups stay as they are."""
    return 16 if PLAIN in tensors else bits


def _groups(tensors: Mapping[str, torch.Tensor], count: int) -> list[dict[str, torch.Tensor]]:
    """The tensors of each of the first ``count`` groups, by their names in a plain model."""
    groups: list[dict[str, torch.Tensor]] = [{} for _ in range(count)]
    for name, one in tensors.items():
        stem, _, number = name.partition(".")
        index = int(number) if _is_number(number) else 0
        if stem != STATE and index < count and name == _named(stem, index):
            groups[index][stem] = one
    return groups


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 5


def _named(name: str, group: int) -> str:
    return f"{name}.{group}" if group else name
