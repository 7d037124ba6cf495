"""The contract of a remote store's client."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from kvboost.tokens.hashing import ChunkKey

Fault = Literal["timeout", "unreachable", "full", "corrupt", "error"]
"""The kinds of failure. "full" and "corrupt" mean that the store itself answered."""


class Backend(Protocol):
    """Keeps values by key on another machine, within a budget. Safe to call from several threads.
    A call that fails may raise any exception; ``fault`` says what kind it is."""

    @property
    def max_bytes(self) -> int: ...

    @property
    def has_index(self) -> bool:
        """Whether values can be found by their marks. If not, ``put`` ignores marks and ``find``
        finds nothing."""

    def fault(self, error: Exception) -> Fault: ...

    def get(self, key: ChunkKey, most_bytes: int | None = None) -> bytes | None:
        """The value as it was received, unchecked; None if there is none. If it has more than
        ``most_bytes``, or something else than a value of ours has this key, bytes that are not a
        chunk: a larger value is not received."""

    def put(
        self, key: ChunkKey, value: bytes, marks: Sequence[str] = (), *, in_front: bool = True
    ) -> bool:
        """Keeps ``value``, a whole chunk as ``codec.encode`` writes it, and evicts older values
        first if the budget requires it. False if it does not fit or another writer was faster. A
        value exists whole or not at all. True if there is one already.

        ``marks`` are names of 16 hexadecimal digits by which :meth:`find` finds the value for as
        long as it is there. Of the values that share a mark a few are found, the newest first;
        without ``in_front`` this one comes after all others."""

    def delete(self, key: ChunkKey) -> None: ...

    def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        """Which of ``keys`` there is a value for, in one round trip."""

    def keys(self) -> list[ChunkKey]: ...

    def headers(self, keys: Sequence[ChunkKey]) -> list[bytes | None]:
        """The beginnings of these values, long enough for ``codec.read_header``; None also where
        that would be more than ``codec.LONGEST_HEADER``."""

    def find(
        self, marks: Sequence[str], keys: Sequence[ChunkKey] = ()
    ) -> list[tuple[ChunkKey, bytes]]:
        """The keys and headers of those of ``keys`` that are there and of the values that have one
        of ``marks``, up to a limit, in one round trip. Unchecked: others may have changed marks."""

    def nbytes(self) -> int: ...

    def close(self) -> None: ...
