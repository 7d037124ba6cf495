"""Copies rows between chunks and a request's own KV, rotating the keys of moved text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from kvboost.cache.admission import Pack
from kvboost.cache.lookup.hits import Hit
from kvboost.cache.mixed import group_of, join_groups, states_of, with_states
from kvboost.cache.quantize import KVData, NewRows, Quantizer
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.states import RowStates


def place(
    hit: Hit, data: KVData, kv: RequestKV, packer: Quantizer, share: float | None = None
) -> None:
    """Copies the rows of a hit from its chunk's ``data`` into ``kv``. With a ``share``, they are
    mixed with the rows that are there, which have the rest."""
    rows = range(hit.start, hit.end)
    place_rows(data, hit.chunk.base_position, hit.offset, rows, kv, packer, share, hit.turn)


def place_rows(
    data: KVData,
    base: int,
    offset: int,
    where: range,
    kv: RequestKV,
    packer: Quantizer,
    share: float | None = None,
    turn: int = 0,
) -> None:
    """As :func:`place`: the rows of ``data``, a chunk from position ``base`` on, that begin at
    ``offset``. Their keys are rotated ``turn`` positions further than the rows are moved."""
    there = None if share is None else kv.rows(where.start, where.stop).clone()
    with kv.filling(where.start, where.stop) as rows:
        packer.place(data, base, offset, where.start + turn, rows)
        if there is not None and share is not None:
            rows.lerp_(there, 1 - share)


class Packer:
    """Copies rows of chunks into requests, and rows of requests for chunks. There is a quantizer
    for each group of layers that are alike."""

    def __init__(self, *quantizers: Quantizer) -> None:
        self._quantizers = quantizers

    def place(self, hit: Hit, data: KVData, kv: RequestKV, share: float | None = None) -> None:
        """As :func:`place`."""
        for number, (group, quantizer) in enumerate(zip(kv.groups, self._quantizers, strict=True)):
            place(hit, self._of_group(data, number), group, quantizer, share)

    def packing(self, kv: RequestKV) -> Pack:
        """Gives rows of ``kv`` for chunks."""

        def pack(parts: Sequence[NewRows]) -> list[KVData]:
            start, end = parts[0].start, parts[-1].end
            groups = []
            for number, group in enumerate(kv.groups):
                own = [
                    part
                    if part.like is None
                    else replace(part, like=self._of_group(part.like, number))
                    for part in parts
                ]
                groups.append(self._quantizers[number].pack_all(group.rows(start, end), own))
            if len(groups) == 1:
                return groups[0]
            return [join_groups(part) for part in zip(*groups, strict=True)]

        return pack

    def finish(self, kv: RequestKV) -> None:
        """Every hit of a request is in place, and its data are still held."""

    def _of_group(self, data: KVData, number: int) -> KVData:
        return data if len(self._quantizers) == 1 else group_of(data, number)


class StatePacker(Packer):
    """The same for a model with states, which go with the rows that ``rows`` packs. ``own`` makes
    the copy to be stored."""

    def __init__(self, rows: Packer, own: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._rows = rows
        self._own = own

    def place(self, hit: Hit, data: KVData, kv: RequestKV, share: float | None = None) -> None:
        self._rows.place(hit, data, kv, share)
        _states(kv).place(hit.end, states_of(data))

    def finish(self, kv: RequestKV) -> None:
        _states(kv).resume()

    def packing(self, kv: RequestKV) -> Pack:
        pack_rows, states = self._rows.packing(kv), _states(kv)

        def pack(parts: Sequence[NewRows]) -> list[KVData]:
            packed = []
            for part, data in zip(parts, pack_rows(parts), strict=True):
                known = states.at(part.end)
                copies = None if known is None else [self._own(one) for one in known]
                packed.append(data if copies is None else with_states(data, copies))
            return packed

        return pack


def _states(kv: RequestKV) -> RowStates:
    assert kv.states is not None
    return kv.states
