"""States of layers without rows, which are stored with the chunks after which a prompt can go on.

A state may be as large as the KV of thousands of tokens. Every turn of a conversation leaves some,
where its prompt and its answer end, and later turns go on from the last ones. So the earlier ones
are dropped again, unless other text has gone on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from kvboost.cache.chunk import ChunkInfo, KVChunk
from kvboost.cache.mixed import without_states
from kvboost.tokens.hashing import ChunkKey


@dataclass(frozen=True)
class KnownStates:
    """Where the states of a sequence are known."""

    rows: frozenset[int]
    """The ends of chunks that are to be stored with them."""
    turns: frozenset[int] = frozenset()
    """Those of them at which the prompt or the answer of a turn ends."""
    since: int = 0
    """Of turns that ended before this row, none is the last one."""


class TurnEnds:
    """The chunks whose states were kept because a turn ended there. What an earlier process has
    kept is not known: it stays until it is evicted. Not thread-safe."""

    def __init__(self) -> None:
        self._keys: set[ChunkKey] = set()

    def note(self, infos: Iterable[ChunkInfo], turns: frozenset[int]) -> None:
        """These are new."""
        self._keys.update(info.key for info in infos if info.has_state and info.end in turns)

    def on_gone(self, key: ChunkKey) -> None:
        self._keys.discard(key)

    def over(
        self, path: Sequence[ChunkInfo], since: int, is_needed: Callable[[ChunkKey], bool]
    ) -> list[ChunkInfo]:
        """The chunks of ``path`` whose states are to be dropped, because they ended turns before
        row ``since`` and nothing else needs them. They are turn ends no more."""
        found = [
            info
            for info in path
            if info.key in self._keys and info.end < since and not is_needed(info.key)
        ]
        self._keys.difference_update(info.key for info in found)
        return found


def rows_only(chunk: KVChunk) -> KVChunk:
    """The same chunk without states."""
    data = without_states(chunk.data)
    return KVChunk(replace(chunk.info, nbytes=data.nbytes, has_state=False), data)
