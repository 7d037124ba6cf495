"""The division of chunks among ranks: memory holds parts of them, slow tiers hold whole ones."""

from __future__ import annotations

from typing import Protocol

from kvboost.cache.chunk import KVChunk


class Shards(Protocol):
    """Divides a chunk among ranks. May wait for other processes: call no method with the store's
    lock held."""

    def split(self, chunk: KVChunk) -> KVChunk:
        """This rank's part of a whole chunk; the other ranks get theirs."""

    def join(self, part: KVChunk) -> KVChunk | None:
        """The whole chunk; None if a rank has lost its part."""

    def is_complete(self, part: KVChunk) -> bool:
        """Whether every rank has its part."""


class OneRank:
    """Nothing is shared out: a part is the whole chunk."""

    def split(self, chunk: KVChunk) -> KVChunk:
        return chunk

    def join(self, part: KVChunk) -> KVChunk:
        return part

    def is_complete(self, part: KVChunk) -> bool:
        return True


ONE_RANK = OneRank()
