"""Running requests and chunks in memory, of which every rank holds its heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from kvboost.cache.admission import Pack
from kvboost.cache.chunk import KVChunk
from kvboost.cache.lookup.hits import Hit
from kvboost.cache.quantize import KVData, NewRows, Quantizer, join_heads
from kvboost.cache.tiers.ram import RamTier
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.reuse.assemble import Packer
from kvboost.runtime.parallel.follower import Follower
from kvboost.runtime.parallel.ranks import Handle, Ranks


class ShardedKV(RequestKV):
    """Rank 0's heads. The other ranks have a buffer with the same rows."""

    def __init__(self, ranks: Ranks, shape: KVShape, num_tokens: int) -> None:
        super().__init__(shape, num_tokens)
        self._ranks = ranks
        self._handle = ranks.new_handle()
        ranks.cast(Follower.new_kv, self.number, num_tokens)

    @property
    def number(self) -> int:
        return self._handle.number

    def reserve(self, num_tokens: int) -> None:
        if num_tokens > self.capacity:
            self._ranks.cast(Follower.reserve, self.number, num_tokens)
            super().reserve(num_tokens)

    def clear(self, start: int, end: int) -> None:
        self._ranks.cast(Follower.clear, self.number, start, end)
        super().clear(start, end)


def number_of(known: RequestKV | KVData) -> int:
    """The number by which the other ranks know a buffer or a chunk."""
    assert known.number is not None
    return known.number


@dataclass(frozen=True, eq=False)
class ShardedData(KVData):
    """Rank 0's heads of a chunk. The other ranks hold theirs for as long as this object lives, so
    what rank 0's tiers keep and evict, all ranks keep and evict."""

    ranks: Ranks = field(kw_only=True)
    handle: Handle = field(kw_only=True)

    @property
    def number(self) -> int:
        return self.handle.number

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> KVData:
        """If that moves the data to another device, the other ranks copy theirs there too."""
        changed = {name: change(one) for name, one in self.tensors.items()}
        before, (device,) = (
            {one.device for one in some.values()} for some in (self.tensors, changed)
        )
        if before == {device}:
            return replace(self, tensors=changed)
        handle, to_host = self.ranks.new_handle(), device == torch.device("cpu")
        self.ranks.cast(Follower.copy, handle.number, self.number, to_host=to_host)
        return replace(self, tensors=changed, handle=handle)


def shard(local: KVData, ranks: Ranks, handle: Handle) -> ShardedData:
    """``local`` as rank 0's heads of the chunk that the other ranks know by ``handle``."""
    return ShardedData(local.bits, local.tensors, ranks=ranks, handle=handle)


class ShardedPacker(Packer):
    """Every rank copies its own heads."""

    def __init__(self, ranks: Ranks, quantizer: Quantizer) -> None:
        super().__init__(quantizer)
        self._ranks = ranks

    def place(self, hit: Hit, data: KVData, kv: RequestKV, share: float | None = None) -> None:
        base, where = hit.chunk.base_position, range(hit.start, hit.end)
        numbers = number_of(kv), number_of(data)
        self._ranks.cast(Follower.place, *numbers, base, hit.offset, where, share, hit.turn)
        super().place(hit, data, kv, share)

    def packing(self, kv: RequestKV) -> Pack:
        number, pack_here = number_of(kv), super().packing(kv)

        def pack(parts: Sequence[NewRows]) -> list[KVData]:
            asked = [self._ask_to_pack(number, part) for part in parts]
            local = pack_here(parts)
            return [
                self._joined(data, handle, packed)
                for data, (handle, packed) in zip(local, asked, strict=True)
            ]

        return pack

    def _ask_to_pack(self, kv: int, part: NewRows) -> tuple[Handle, list[int]]:
        """Has the other ranks pack ``part``."""
        handle = self._ranks.new_handle()
        known = None if part.like is None else part.like.number
        asked = handle.number, kv, part.start, part.end, known, part.common
        return handle, self._ranks.ask(Follower.pack, *asked)

    def _joined(self, local: KVData, handle: Handle, packed: Sequence[int]) -> ShardedData:
        if any(bits != local.bits for bits in packed):
            raise RuntimeError("numbers too large to be quantized, in the heads of some ranks only")
        return shard(local, self._ranks, handle)


class RankShards:
    """Rank ``r`` of ``n`` holds the KV heads from ``r / n`` of them on, up to where the next rank
    begins. Where the ranks' model is not split by heads, each holds them all."""

    def __init__(self, ranks: Ranks, ram: RamTier, heads_here: int, num_heads: int) -> None:
        self._ranks = ranks
        self._ram = ram
        self._heads_here = heads_here
        self._is_split = heads_here < num_heads

    def split(self, chunk: KVChunk) -> KVChunk:
        """Other ranks that have no memory for their part are found out by ``is_complete``."""
        own, *others = (self._part(chunk.data, rank) for rank in range(self._ranks.size))
        handle = self._ranks.new_handle()
        contiguous = torch.Tensor.contiguous
        parts = [(handle.number, part.map(contiguous)) for part in others]
        self._ranks.ask_each(Follower.take, parts)
        return _with(chunk, shard(own.map(self._ram.own), self._ranks, handle))

    def join(self, part: KVChunk) -> KVChunk | None:
        own = KVData(part.data.bits, part.data.tensors)
        if not self._is_split:
            return _with(part, own)
        given = self._ranks.ask(Follower.give, number_of(part.data))
        others = [one for one in given if one is not None]
        return _with(part, join_heads([own, *others])) if len(others) == len(given) else None

    def is_complete(self, part: KVChunk) -> bool:
        return all(self._ranks.ask(Follower.has, number_of(part.data)))

    def _part(self, data: KVData, rank: int) -> KVData:
        if not self._is_split:
            return data
        return data.heads(rank * self._heads_here, (rank + 1) * self._heads_here)


def _with(chunk: KVChunk, data: KVData) -> KVChunk:
    return KVChunk(replace(chunk.info, nbytes=data.nbytes), data)
