"""Which blocks of text our tiers hold, for KV events: routers send a request to the engine that
holds its beginning.

A block is a fixed number of tokens, named by a hash that chains the tokens before it. It is
announced when exact chunks hold all of its rows, and is taken back when one of these chunks has
left the last tier. Approximate rows are never announced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from kvboost.cache.lookup.hits import Hit
from kvboost.tokens.hashing import ChunkKey, TokenIds


@dataclass(frozen=True)
class Stored:
    """Neighbouring blocks; ``parent`` is the block before them, None at the start."""

    hashes: tuple[bytes, ...]
    parent: bytes | None
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Removed:
    hashes: tuple[bytes, ...]


@dataclass(frozen=True)
class Cleared:
    """No block is held any more."""


class Announcements:
    """The announced blocks, and the next announcements. ``page`` is the number of rows in a block.
    Not thread-safe."""

    def __init__(self, page: int) -> None:
        self._page = page
        self._chunks: dict[bytes, tuple[ChunkKey, ...]] = {}
        self._blocks: dict[ChunkKey, set[bytes]] = {}
        self._stored: list[Stored] = []
        self._gone: list[ChunkKey] = []

    def __len__(self) -> int:
        """The number of announced blocks."""
        return len(self._chunks)

    def store(self, hashes: Sequence[bytes], token_ids: TokenIds, hits: Sequence[Hit]) -> None:
        """``hashes`` name the first blocks of ``token_ids``, and the exact ``hits`` hold its first
        rows, without gaps."""
        new: list[int] = []
        for block, chunks in enumerate(self._holders(len(hashes), hits)):
            name = bytes(hashes[block])
            if name not in self._chunks:
                new.append(block)
            self._hold(name, chunks)
        while new:
            run = next((at for at in range(1, len(new)) if new[at] != new[at - 1] + 1), len(new))
            first, end = new[0], new[run - 1] + 1
            self._stored.append(
                Stored(
                    tuple(bytes(name) for name in hashes[first:end]),
                    bytes(hashes[first - 1]) if first else None,
                    tuple(token_ids[first * self._page : end * self._page].tolist()),
                )
            )
            del new[:run]

    def gone(self, keys: Iterable[ChunkKey]) -> None:
        """These chunks are in no tier any more, unless they are stored again meanwhile."""
        self._gone += [key for key in keys if key in self._blocks]

    def clear(self) -> list[Stored | Removed | Cleared]:
        """Forgets everything; what to say then. The blocks are named as well, because some routers
        only log the event that clears them all."""
        names = tuple(self._chunks)
        self._chunks.clear()
        self._blocks.clear()
        self._stored.clear()
        self._gone.clear()
        return [*([Removed(names)] if names else []), Cleared()]

    def take(self, is_known: Callable[[ChunkKey], bool]) -> list[Stored | Removed]:
        """The announcements to make now. ``is_known`` says whether a chunk is in some tier."""
        stored, self._stored = self._stored, []
        gone, self._gone = self._gone, []
        removed: list[bytes] = []
        for key in gone:
            if is_known(key):
                continue
            for name in sorted(self._blocks.pop(key, ())):
                if key in self._chunks.get(name, ()):
                    self._release(name)
                    removed.append(name)
        return [*stored, *([Removed(tuple(removed))] if removed else [])]

    def _holders(self, most: int, hits: Sequence[Hit]) -> list[tuple[ChunkKey, ...]]:
        """For each block that is held as a whole, the chunks it is in."""
        end = hits[-1].end if hits else 0
        blocks = min(most, end // self._page)
        held: list[list[ChunkKey]] = [[] for _ in range(blocks)]
        for hit in hits:
            last = min(blocks, -(-hit.end // self._page))
            for block in range(hit.start // self._page, last):
                held[block].append(hit.chunk.key)
        return [tuple(keys) for keys in held]

    def _hold(self, name: bytes, chunks: tuple[ChunkKey, ...]) -> None:
        """Notes that ``chunks`` hold the block now, and no others."""
        if self._chunks.get(name) == chunks:
            return
        self._release(name)
        self._chunks[name] = chunks
        for key in chunks:
            self._blocks.setdefault(key, set()).add(name)

    def _release(self, name: bytes) -> None:
        for key in self._chunks.pop(name, ()):
            names = self._blocks.get(key, set())
            names.discard(name)
            if not names:
                self._blocks.pop(key, None)
