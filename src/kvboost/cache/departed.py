"""Remembers the last chunks that have left the cache: their names and when, no text."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvboost.cache.chunk import ChunkInfo
from kvboost.results.explaining import GoneRows
from kvboost.tokens.hashing import ChunkKey, TokenIds, chain_key

REMEMBERED = 8192


class Left(NamedTuple):
    """A chunk that is gone."""

    key: ChunkKey
    parent: ChunkKey
    num_tokens: int
    how: str
    at: float


class Departed:
    """Not thread-safe: the store holds its lock around every call of a method."""

    def __init__(self) -> None:
        self._left: deque[Left] = deque(maxlen=REMEMBERED)

    def note(self, info: ChunkInfo, how: str) -> None:
        self._left.append(Left(info.key, info.parent, info.num_tokens, how, time.time()))

    def until(self, at: float) -> list[Left]:
        """Those that were gone at the time ``at``."""
        return [one for one in self._left if one.at <= at]


def gone_rows(
    left: Iterable[Left], starts: Sequence[tuple[ChunkKey, int]], token_ids: TokenIds, secret: bytes
) -> list[GoneRows]:
    """The chunks of ``left`` that held rows of a prompt at their own positions: those that follow
    one of ``starts``, which are chunks and the rows at which they end, and so on. Of several paths
    the longest."""
    children: dict[ChunkKey, dict[ChunkKey, Left]] = {}
    for one in left:
        children.setdefault(one.parent, {})[one.key] = one
    best: list[GoneRows] = []
    for parent, row in starts:
        path: list[GoneRows] = []
        while (found := _next(children.get(parent), parent, token_ids[row:], secret)) is not None:
            path.append(GoneRows(row, row + found.num_tokens, found.how, found.at))
            parent, row = found.key, row + found.num_tokens
        if path and (not best or path[-1].end > best[-1].end):
            best = path
    return best


def _next(
    children: dict[ChunkKey, Left] | None, parent: ChunkKey, token_ids: TokenIds, secret: bytes
) -> Left | None:
    """The longest of ``children`` that holds the first of ``token_ids``."""
    if children is None:
        return None
    lengths = sorted({one.num_tokens for one in children.values()}, reverse=True)
    for length in lengths:
        if length <= len(token_ids):
            found = children.get(chain_key(parent, token_ids[:length], secret=secret))
            if found is not None:
                return found
    return None
