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
from kvboost.model.execution.kv import KVPool, RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.reuse.assemble import KVRows, Packer
from kvboost.runtime.parallel import messages
from kvboost.runtime.parallel.ranks import Handle, Ranks


class ShardedKV(RequestKV):
    """Rank 0's heads. The other ranks have a buffer with the same rows."""

    def __init__(self, ranks: Ranks, shape: KVShape, num_tokens: int) -> None:
        super().__init__(shape, num_tokens)
        self._ranks = ranks
        self._handle = ranks.new_handle()
        ranks.cast(messages.NewKV(self.number, num_tokens))

    @property
    def number(self) -> int:
        return self._handle.number

    def reserve(self, num_tokens: int) -> None:
        if num_tokens > self.capacity:
            self._ranks.cast(messages.Reserve(self.number, num_tokens))
            super().reserve(num_tokens)

    def clear(self, start: int, end: int) -> None:
        self._ranks.cast(messages.Clear(self.number, start, end))
        super().clear(start, end)


def number_of(kv: object) -> int:
    """The number by which the other ranks know a buffer."""
    assert isinstance(kv, ShardedKV)
    return kv.number


class ShardedPool(KVPool):
    """Idle buffers keep theirs on the other ranks, too."""

    def __init__(self, ranks: Ranks, shape: KVShape, max_idle: int) -> None:
        super().__init__(shape, max_idle)
        self._ranks = ranks

    def _make(self, num_tokens: int) -> RequestKV:
        return ShardedKV(self._ranks, self.shape, num_tokens)


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
        devices = {one.device.type for one in changed.values()}
        assert len(devices) == 1
        if devices == {one.device.type for one in self.tensors.values()}:
            return replace(self, tensors=changed)
        handle = self.ranks.new_handle()
        self.ranks.cast(messages.Copy(handle.number, self.number, devices.pop()))
        return replace(self, tensors=changed, handle=handle)


def shard(local: KVData, ranks: Ranks, handle: Handle) -> ShardedData:
    """``local`` as rank 0's heads of the chunk that the other ranks know by ``handle``."""
    return ShardedData(local.bits, local.tensors, ranks=ranks, handle=handle)


class ShardedPacker(Packer):
    """Every rank copies its own heads."""

    def __init__(self, ranks: Ranks, quantizer: Quantizer) -> None:
        super().__init__(quantizer)
        self._ranks = ranks

    def place(self, hit: Hit, data: KVData, kv: KVRows, share: float | None = None) -> None:
        assert isinstance(data, ShardedData)
        base = hit.chunk.base_position
        where = base, hit.offset, hit.start, hit.end
        self._ranks.cast(messages.Place(number_of(kv), data.number, *where, share, hit.turn))
        super().place(hit, data, kv, share)

    def packing(self, kv: KVRows) -> Pack:
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
        known = part.like.number if isinstance(part.like, ShardedData) else None
        asked = messages.PackRows(handle.number, kv, part.start, part.end, known, part.common)
        return handle, self._ranks.ask(asked)

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
        self._ranks.ask_each(
            [messages.Take(handle.number, part.map(contiguous)) for part in others]
        )
        return _with(chunk, shard(own.map(self._ram.own), self._ranks, handle))

    def join(self, part: KVChunk) -> KVChunk | None:
        assert isinstance(part.data, ShardedData)
        own = KVData(part.data.bits, part.data.tensors)
        if not self._is_split:
            return _with(part, own)
        others = self._ranks.ask(messages.Give(part.data.number))
        if any(other is None for other in others):
            return None
        return _with(part, join_heads([own, *others]))

    def is_complete(self, part: KVChunk) -> bool:
        assert isinstance(part.data, ShardedData)
        return all(self._ranks.ask(messages.Has(part.data.number)))

    def _part(self, data: KVData, rank: int) -> KVData:
        if not self._is_split:
            return data
        return data.heads(rank * self._heads_here, (rank + 1) * self._heads_here)


def _with(chunk: KVChunk, data: KVData) -> KVChunk:
    return KVChunk(replace(chunk.info, nbytes=data.nbytes), data)
