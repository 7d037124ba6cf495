"""Who goes first when room is needed.

Chunks hang below one another, and one whose parent is gone can never be reached again. So every
policy here lines up only the chunks without children; a parent joins the line when its last child
has left. What differs is the order of the line. The one to use is
:class:`kvboost.cache.eviction.learned.LearnedPolicy`; those in this file are small, and serve to
compare with it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import Protocol

from kvboost.tokens.hashing import ChunkKey


@dataclass(frozen=True, slots=True)
class Entry:
    """What a policy is told about a chunk."""

    key: ChunkKey
    parent: ChunkKey
    """Key of the chunk before it, or a root that no policy knows."""
    nbytes: int
    cost: float
    """What computing it again would take, in any unit that is the same for all."""
    importance: float = 1.0
    """How much more than an ordinary chunk it matters; heeded only by policies told to."""


class EvictionPolicy(Protocol):
    """Orders chunks by how little they will be missed. Not thread-safe.

    For each request ``touch`` is called with the path that hit, then chunks may be removed, then
    ``add`` is called with the new ones.
    """

    def add(self, entries: Sequence[Entry]) -> None:
        """One request's new chunks, parents first: their first use."""

    def restore(self, entries: Sequence[Entry]) -> None:
        """Chunks that were found, such as at a start, those used longest ago first: when they
        were used is not known."""

    def touch(self, path: Sequence[ChunkKey]) -> None:
        """A request used this path again, first chunk first. Unknown keys are passed over: a
        chunk may have been lost meanwhile."""

    def remove(self, key: ChunkKey) -> None:
        """It left: evicted, lost or forgotten. Raises ``KeyError`` if it is not here."""

    def __iter__(self) -> Iterator[ChunkKey]:
        """Chunks, the one to go first coming first, children before their parents. The first few
        are cheap. Nothing may be changed between two steps."""

    def uses(self, key: ChunkKey) -> int:
        """How often it was used since it came, its coming included."""

    def __len__(self) -> int: ...

    def __contains__(self, key: object) -> bool: ...


def recompute_cost(position: int, num_tokens: int, attention_share: float) -> float:
    """What computing ``num_tokens`` from ``position`` on again would take, in tokens at the very
    beginning: each attends to all before it, which adds ``attention_share`` of a token for every
    one of them."""
    return num_tokens * (1.0 + attention_share * (position + (num_tokens - 1) / 2))


Rank = tuple[float, float]
"""The smaller goes first."""


@dataclass(eq=False, slots=True)
class Node:
    """A chunk that is here."""

    entry: Entry
    added: int
    used: int
    uses: int = 1
    ticket: int = -1
    """Of its valid place in line; none while it has children."""


class LeafQueuePolicy(ABC):
    """A line of the chunks that have no children, by their ranks: a heap in which places that are
    no longer valid stay until they come up. Who lost the last child joins when the line is looked
    at, as most leave before. Time is counted in chunks used."""

    def __init__(self) -> None:
        self._nodes: dict[ChunkKey, Node] = {}
        self._children: dict[ChunkKey, int] = {}
        self._line: list[tuple[Rank, int, Node]] = []
        self._joining: dict[ChunkKey, None] = {}
        self._tickets = 0
        self._now = 0

    def uses(self, key: ChunkKey) -> int:
        return self._nodes[key].uses

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    def __iter__(self) -> Iterator[ChunkKey]:
        """Walks the heap from its top, so that it stays as it is: after a place come its two
        successors in the heap, and the parent whose children have all been passed."""
        for key in self._joining:
            self._queue(self._nodes[key])
        self._joining.clear()
        line = self._line
        while line and line[0][1] != line[0][2].ticket:
            heappop(line)
        ahead = [(*line[0], 0)] if line else []
        passed: dict[ChunkKey, int] = {}
        orphaned = 0
        while ahead:
            _, ticket, node, place = heappop(ahead)
            if place < 0 or ticket == node.ticket:
                yield node.entry.key
                above = node.entry.parent
                parent = self._nodes.get(above)
                if parent is not None:
                    passed[above] = passed.get(above, 0) + 1
                    if passed[above] == self._children[above]:
                        orphaned += 1
                        heappush(ahead, (self._rank(parent), -orphaned, parent, -1))
            if place >= 0:
                for successor in (2 * place + 1, 2 * place + 2):
                    if successor < len(line):
                        heappush(ahead, (*line[successor], successor))

    def add(self, entries: Sequence[Entry]) -> None:
        for entry in entries:
            assert entry.key not in self._nodes, f"{entry.key} is here already"
            self._now += 1
            self._nodes[entry.key] = Node(entry, self._now, self._now)
            self._children[entry.parent] = self._children.get(entry.parent, 0) + 1
            parent = self._nodes.get(entry.parent)
            if parent is not None:
                parent.ticket = -1
                self._joining.pop(entry.parent, None)
        for entry in entries:
            if entry.key not in self._children:
                self._queue(self._nodes[entry.key])

    def restore(self, entries: Sequence[Entry]) -> None:
        self.add(entries)

    def touch(self, path: Sequence[ChunkKey]) -> None:
        self._now += len(path)
        for key in path:
            node = self._nodes.get(key)
            if node is not None:
                node.uses += 1
                node.used = self._now
                if key not in self._children:
                    self._queue(node)

    def remove(self, key: ChunkKey) -> None:
        node = self._nodes.pop(key)
        node.ticket = -1
        self._joining.pop(key, None)
        parent = node.entry.parent
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if parent in self._nodes:
                self._joining[parent] = None

    @abstractmethod
    def _rank(self, node: Node) -> Rank:
        """Where it stands in line, were it to join now."""

    def _queue(self, node: Node) -> None:
        """A chunk without children takes the place that its rank gives it now."""
        self._tickets += 1
        node.ticket = self._tickets
        heappush(self._line, (self._rank(node), node.ticket, node))
        if len(self._line) > 2 * len(self._nodes) + 64:
            self._line = [place for place in self._line if place[1] == place[2].ticket]
            heapify(self._line)

    def _queue_again(self) -> None:
        """Everyone in line takes the place that its rank gives it now."""
        leaves = [node for _, ticket, node in self._line if ticket == node.ticket]
        self._line = [(self._rank(node), node.ticket, node) for node in leaves]
        heapify(self._line)


class LRU(LeafQueuePolicy):
    """Least recently used."""

    def _rank(self, node: Node) -> Rank:
        return node.used, 0.0


class FIFO(LeafQueuePolicy):
    """First in, first out."""

    def _rank(self, node: Node) -> Rank:
        return node.added, 0.0


class LFU(LeafQueuePolicy):
    """Least frequently used since it came in; among equals the least recently used."""

    def _rank(self, node: Node) -> Rank:
        return node.uses, node.used
