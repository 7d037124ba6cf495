"""The files of a cache folder at the last look: which there are in each of its 256 subfolders."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from kvboost.tokens.hashing import ChunkKey


class Other(NamedTuple):
    """A chunk that another version of KVBoost wrote."""

    used: int
    """When it was last used, in nanoseconds."""
    size: int


@dataclass
class Shard:
    """One of the folders: when it had changed at the last look, and what it held."""

    changed: int = 0
    settled: bool = False
    """Whether a second look has found no change: a file may be added within the same tick of the
    clock that shows changes."""
    sizes: dict[ChunkKey, int] = field(default_factory=dict)
    others: dict[ChunkKey, Other] = field(default_factory=dict)

    def is_as_before(self, changed: int) -> bool:
        """Whether a folder that changed at ``changed`` need not be looked at again; notes it."""
        if self.changed == changed and self.settled:
            return True
        self.changed, self.settled = changed, self.changed == changed
        return False


class Contents:
    """Not thread-safe: its tier locks."""

    def __init__(self) -> None:
        self.shards = {f"{number:02x}": Shard() for number in range(256)}
        self.nbytes = 0

    def __contains__(self, key: ChunkKey) -> bool:
        """Whether there is a chunk of this key that we can read."""
        return key in self.shards[key[:2]].sizes

    def __iter__(self) -> Iterator[ChunkKey]:
        return (key for shard in self.shards.values() for key in shard.sizes)

    @property
    def others(self) -> dict[ChunkKey, Other]:
        """The chunks of other versions."""
        return {key: one for shard in self.shards.values() for key, one in shard.others.items()}

    def is_other(self, key: ChunkKey) -> bool:
        return key in self.shards[key[:2]].others

    def add(self, key: ChunkKey, size: int) -> None:
        self.remove(key)
        self.shards[key[:2]].sizes[key] = size
        self.nbytes += size

    def add_other(self, key: ChunkKey, other: Other) -> None:
        self.remove(key)
        self.shards[key[:2]].others[key] = other
        self.nbytes += other.size

    def remove(self, key: ChunkKey) -> None:
        """Removes ``key`` if it is there."""
        shard = self.shards[key[:2]]
        self.nbytes -= shard.sizes.pop(key, 0)
        if (other := shard.others.pop(key, None)) is not None:
            self.nbytes -= other.size
