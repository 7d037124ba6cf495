"""Finds the stored chunks that a prompt begins with: a prefix tree with token-level tails.

A node is a chunk; its children are the chunks that were seen directly after it. Siblings are sorted
by their tokens, so the sibling that shares most with a prompt is next to where the prompt itself
would be inserted: one binary search finds it, however many there are. The last chunk of a match may
be used in part.

Not thread-safe: the store holds its lock around every call.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvboost.tokens.hashing import ChunkKey, TokenIds, common_prefix

TOKEN_BYTES = 4
"""Of a token in sortable bytes."""


class PrefixMatch(NamedTuple):
    """The first ``num_tokens`` of chunk ``key`` are the next ones of the prompt."""

    key: ChunkKey
    num_tokens: int


@dataclass
class _Siblings:
    """Children of one parent: ``order[i]`` are the tokens of ``keys[i]`` as sortable bytes."""

    order: list[bytes] = field(default_factory=list)
    keys: list[ChunkKey] = field(default_factory=list)


class Node(NamedTuple):
    """A chunk."""

    parent: ChunkKey
    token_ids: TokenIds
    order: bytes
    """The tokens as sortable bytes."""


class PrefixTree:
    def __init__(self) -> None:
        self.nodes: dict[ChunkKey, Node] = {}
        """For reading only."""
        self._children: dict[ChunkKey, _Siblings] = {}
        self._longest = 0

    def __len__(self) -> int:
        return len(self.nodes)

    def __contains__(self, key: ChunkKey) -> bool:
        return key in self.nodes

    def num_children(self, key: ChunkKey) -> int:
        siblings = self._children.get(key)
        return 0 if siblings is None else len(siblings.keys)

    def match(
        self, root: ChunkKey, token_ids: TokenIds, start: int = 0, order: bytes | None = None
    ) -> list[PrefixMatch]:
        """The chunks that cover the longest known beginning of ``token_ids[start:]``, in order.
        ``order``: the ``token_ids``, and perhaps more that follow, as sortable bytes, if they are
        at hand."""
        path: list[PrefixMatch] = []
        if root not in self._children:
            return path
        parent = root
        order = sortable(token_ids) if order is None else order
        while start < len(token_ids):
            end = min(start + self._longest, len(token_ids))
            wanted = order[start * TOKEN_BYTES : end * TOKEN_BYTES]
            best = self._best_child(parent, token_ids[start:end], wanted)
            if best is None:
                break
            path.append(best)
            if best.num_tokens < len(self.nodes[best.key].token_ids):
                break
            parent, start = best.key, start + best.num_tokens
        return path

    def best_child(
        self, parent: ChunkKey, token_ids: TokenIds, order: bytes | None = None
    ) -> PrefixMatch | None:
        """The child of ``parent`` that shares most leading tokens with ``token_ids``, which are
        ``order`` as sortable bytes, if these are at hand."""
        if parent not in self._children:
            return None
        return self._best_child(parent, token_ids, sortable(token_ids) if order is None else order)

    def _best_child(
        self, parent: ChunkKey, token_ids: TokenIds, wanted: bytes
    ) -> PrefixMatch | None:
        """As :meth:`best_child`; ``wanted`` are the tokens as sortable bytes."""
        siblings = self._children.get(parent)
        if siblings is None:
            return None
        at = bisect_left(siblings.order, wanted)
        best: PrefixMatch | None = None
        for place in range(max(0, at - 1), min(at + 1, len(siblings.keys))):
            key, order = siblings.keys[place], siblings.order[place]
            if wanted.startswith(order):
                common = len(order) // TOKEN_BYTES
            else:
                common = common_prefix(self.nodes[key].token_ids, token_ids)
            if common > (best.num_tokens if best else 0):
                best = PrefixMatch(key, common)
        return best

    def whole_children(self, parent: ChunkKey, token_ids: TokenIds) -> list[ChunkKey]:
        """The children of ``parent`` whose tokens are all at the beginning of ``token_ids``, the
        longest first."""
        siblings = self._children.get(parent)
        if siblings is None:
            return []
        found: list[ChunkKey] = []
        token_ids = token_ids[: self._longest]
        wanted = sortable(token_ids)
        # The last one that does not sort after the wanted bytes is a prefix of them, or shows how
        # long a prefix can be at most: a longer one would sort between the two.
        at = bisect_right(siblings.order, wanted)
        while at:
            key, nearest = siblings.keys[at - 1], siblings.order[at - 1]
            if wanted.startswith(nearest):
                found.append(key)
                wanted = nearest[:-TOKEN_BYTES]
            else:
                common = common_prefix(self.nodes[key].token_ids, token_ids)
                wanted = wanted[: common * TOKEN_BYTES]
            at = bisect_right(siblings.order, wanted, 0, at - 1)
        return found

    def following(self, parent: ChunkKey, token_ids: TokenIds, least: int) -> TokenIds:
        """The first tokens, ``least`` or more if there are as many, of the path below ``parent``
        that shares most with ``token_ids``, or sorts next to them."""
        pieces: list[TokenIds] = []
        wanted = sortable(token_ids[: self._longest])
        while least > 0 and (siblings := self._children.get(parent)) is not None:
            best = self._best_child(parent, token_ids, wanted)
            at = min(bisect_left(siblings.order, wanted), len(siblings.keys) - 1)
            parent = best.key if best is not None else siblings.keys[at]
            pieces.append(self.nodes[parent].token_ids)
            least -= len(pieces[-1])
            token_ids, wanted = token_ids[:0], b""
        return np.concatenate(pieces) if pieces else token_ids[:0]

    def leaf_extended_by(self, parent: ChunkKey, token_ids: TokenIds) -> ChunkKey | None:
        """A childless child of ``parent`` whose tokens are a prefix of ``token_ids``: a chunk of
        ``token_ids`` makes it useless.

        The store drops it, so no sibling is a prefix of another unless it was in use, and it can
        only be directly before ``token_ids`` in the sort order.
        """
        siblings = self._children.get(parent)
        at = bisect_left(siblings.order, sortable(token_ids)) if siblings else 0
        if siblings is None or at == 0:
            return None
        key = siblings.keys[at - 1]
        shorter = len(self.nodes[key].token_ids)
        extended = common_prefix(self.nodes[key].token_ids, token_ids) == shorter
        return key if extended and not self.num_children(key) else None

    def insert(self, key: ChunkKey, parent: ChunkKey, token_ids: TokenIds) -> None:
        siblings = self._children.setdefault(parent, _Siblings())
        order = sortable(token_ids)
        at = bisect_left(siblings.order, order)
        siblings.order.insert(at, order)
        siblings.keys.insert(at, key)
        self.nodes[key] = Node(parent, token_ids, order)
        self._longest = max(self._longest, len(token_ids))

    def remove(self, key: ChunkKey) -> None:
        """Forgets one chunk. Its children, if any, can no longer be reached from it."""
        node = self.nodes.pop(key)
        siblings = self._children[node.parent]
        at = siblings.keys.index(key, bisect_left(siblings.order, node.order))
        del siblings.order[at], siblings.keys[at]
        if not siblings.keys:
            del self._children[node.parent]


def sortable(token_ids: TokenIds) -> bytes:
    """Bytes that sort as the tokens do, and whose prefixes are the tokens' prefixes."""
    return token_ids.astype(">u4").tobytes()
