"""Chunks whose heads are on several ranks, as rank 0 sees them."""

from __future__ import annotations

from typing import Any

import torch

from kvboost.cache.chunk import KVChunk
from kvboost.cache.quantize import KVData, join_heads, plain
from kvboost.cache.tiers.ram import RamTier
from kvboost.runtime.parallel.chunks import RankShards, ShardedData, shard
from kvboost.runtime.parallel.follower import Follower
from kvboost.runtime.parallel.ranks import Handle, Ranks
from support.chunks import make_chunk


class OtherRanks(Ranks):
    """Two other ranks that keep what they are given."""

    def __init__(self) -> None:
        super().__init__([], [], lambda: None)
        self.size = 3
        self.parts: list[dict[int, KVData]] = [{}, {}]
        self.told: list[tuple[Any, ...]] = []

    def cast(self, do: Any, *args: Any, **options: Any) -> None:
        self.told.append((do, args, options))

    def ask_each(self, do: Any, several: Any) -> list[Any]:
        return [
            self._answer(parts, do, *args) for parts, args in zip(self.parts, several, strict=True)
        ]

    def ask(self, do: Any, *args: Any, **options: Any) -> list[Any]:
        return self.ask_each(do, [args, args])

    def _answer(self, parts: dict[int, KVData], do: Any, part: int, *data: KVData) -> Any:
        if do is Follower.take:
            (parts[part],) = data
            return None
        if do is Follower.has:
            return part in parts
        assert do is Follower.give
        return parts.get(part)


def whole_chunk() -> KVChunk:
    """Of six KV heads."""
    return make_chunk(range(16), data=plain(torch.randn(2, 2, 6, 16, 4)))


def test_a_chunk_is_split_by_heads_and_joined_again() -> None:
    ranks, chunk = OtherRanks(), whole_chunk()
    shards = RankShards(ranks, RamTier(1 << 20), 2, 6)
    part = shards.split(chunk)
    assert isinstance(part.data, ShardedData) and part.nbytes * 3 == chunk.nbytes
    assert part.nbytes == part.data.nbytes, "it counts as what is here"
    number = part.data.number
    parts = [part.data, *(held[number] for held in ranks.parts)]
    assert torch.equal(join_heads(parts).tensors["kv"], chunk.data.tensors["kv"])
    joined = shards.join(part)
    assert joined is not None and joined.nbytes == joined.data.nbytes == chunk.nbytes
    assert torch.equal(joined.data.tensors["kv"], chunk.data.tensors["kv"])


def test_a_chunk_with_a_lost_part_is_neither_complete_nor_written() -> None:
    ranks = OtherRanks()
    shards = RankShards(ranks, RamTier(1 << 20), 2, 6)
    part = shards.split(whole_chunk())
    assert shards.is_complete(part)
    ranks.parts[1].clear()
    assert not shards.is_complete(part) and shards.join(part) is None


def test_where_attention_is_not_split_every_rank_holds_the_whole_chunk() -> None:
    ranks, chunk = OtherRanks(), whole_chunk()
    shards = RankShards(ranks, RamTier(1 << 20), 6, 6)
    part = shards.split(chunk)
    held = [part.data, *(next(iter(parts.values())) for parts in ranks.parts)]
    assert all(torch.equal(data.tensors["kv"], chunk.data.tensors["kv"]) for data in held)
    joined = shards.join(part)
    assert joined is not None and joined.nbytes == chunk.nbytes


def test_a_copy_on_another_device_is_made_on_every_rank() -> None:
    ranks = OtherRanks()
    data = shard(whole_chunk().data, ranks, ranks.new_handle())
    same = data.map(torch.clone)
    assert isinstance(same, ShardedData) and same.handle is data.handle and not ranks.told
    there = data.map(lambda tensor: tensor.to("meta"))
    assert isinstance(there, ShardedData) and there.number != data.number
    assert ranks.told == [(Follower.copy, (there.number, data.number), {"to_host": False})]
    assert isinstance(there.handle, Handle)
