"""Who goes first when room is needed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Protocol

from kvboost.tokens.hashing import ChunkKey


class EvictionPolicy(Protocol):
    """Orders chunks by how little they will be missed. Not thread-safe."""

    def add(self, key: ChunkKey) -> None: ...

    def touch(self, path: Iterable[ChunkKey]) -> None:
        """A request used this path, first chunk of the prompt first. Unknown keys are passed over:
        a chunk may have been lost meanwhile."""

    def remove(self, key: ChunkKey) -> None: ...

    def __iter__(self) -> Iterator[ChunkKey]:
        """Chunks, the one to go first coming first."""


class LRU:
    """Least recently used. A path is touched from its end to its beginning, so a parent is
    younger than the children it was used with and outlives them; the store lets no chunk go that
    has any."""

    def __init__(self) -> None:
        self._order: OrderedDict[ChunkKey, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[ChunkKey]:
        return iter(self._order)

    def add(self, key: ChunkKey) -> None:
        self._order[key] = None

    def touch(self, path: Iterable[ChunkKey]) -> None:
        for key in reversed(list(path)):
            if key in self._order:
                self._order.move_to_end(key)

    def remove(self, key: ChunkKey) -> None:
        del self._order[key]
