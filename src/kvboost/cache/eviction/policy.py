"""Which chunk is evicted first when room is needed.

A chunk whose parent is gone can never be reached again. So every policy here queues only the chunks
without children; a parent joins the queue when its last child has left. Policies differ in the
order of the queue; :class:`kvboost.cache.eviction.learned.LearnedPolicy` is the one in use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from kvboost.tokens.hashing import ChunkKey


@dataclass(frozen=True, slots=True)
class Entry:
    """The facts about a chunk that a policy is told."""

    key: ChunkKey
    parent: ChunkKey
    """Key of the chunk before it, or a root that no policy knows."""
    nbytes: int
    cost: float
    """The cost of computing it again, in any unit that is the same for all."""


Study = Callable[[], Callable[[], None]]
"""Learns from a copy of what a policy has seen, in any thread and without a lock. What it returns
is called like the methods of the policy: it puts the result into effect."""


def recompute_cost(position: int, num_tokens: int, attention_share: float) -> float:
    """The cost of computing ``num_tokens`` from ``position`` on again, in units of a first token:
    each token attends to all before it, which adds ``attention_share`` for each of them."""
    return num_tokens * (1.0 + attention_share * (position + (num_tokens - 1) / 2))


Rank = tuple[float, float]
"""The smallest is evicted first."""


@dataclass(eq=False, slots=True)
class Node:
    """A chunk in the tier."""

    entry: Entry
    used: int
    uses: int = 1
    version: int = -1
    """Of its valid entry in the heap; -1 while it has children."""


class EvictionPolicy(ABC):
    """Orders chunks, the least valuable first. Not thread-safe.

    For each request ``touch`` is called with the paths that hit, then chunks may be removed, then
    ``add`` is called with the new ones.

    The chunks that have no children are in a heap, by rank, in which outdated entries stay until
    they reach the top. Chunks get their places when the order is next read, because many are used
    again, get children or leave before that. Time is counted in chunks used."""

    def __init__(self) -> None:
        self._nodes: dict[ChunkKey, Node] = {}
        self._children: dict[ChunkKey, int] = {}
        self._heap: list[tuple[Rank, int, Node]] = []
        self._joining: dict[ChunkKey, Node] = {}
        self._versions = 0
        self._now = 0

    def uses(self, key: ChunkKey) -> int:
        """The number of uses of a chunk since it was added; being added counts."""
        return self._nodes[key].uses

    def __len__(self) -> int:
        return len(self._nodes)

    def __contains__(self, key: object) -> bool:
        return key in self._nodes

    def __iter__(self) -> Iterator[ChunkKey]:
        """The chunks in the order of eviction, children before their parents. The first few are
        cheap. Nothing may be changed between two steps."""
        self._settle()
        heap = self._heap
        while heap and heap[0][1] != heap[0][2].version:
            heappop(heap)
        ahead = [(*heap[0], 0)] if heap else []
        passed: dict[ChunkKey, int] = {}
        orphaned = 0
        # The heap does not change: after an entry come its two successors in it, and its parent
        # once all children of that have been passed.
        while ahead:
            _, version, node, place = heappop(ahead)
            if place < 0 or version == node.version:
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
                    if successor < len(heap):
                        heappush(ahead, (*heap[successor], successor))

    def add(self, entries: Sequence[Entry]) -> None:
        """One request's new chunks, parents first: their first use."""
        for entry in entries:
            assert entry.key not in self._nodes, f"{entry.key} was added before"
            self._now += 1
            node = self._nodes[entry.key] = Node(entry, self._now)
            self._children[entry.parent] = self._children.get(entry.parent, 0) + 1
            parent = self._nodes.get(entry.parent)
            if parent is not None:
                self._leave_queue(parent)
            if entry.key not in self._children:
                self._joining[entry.key] = node

    def restore(self, entries: Sequence[Entry]) -> None:
        """Chunks that were found, for example at a start, those used longest ago first. The times
        of their last uses are not known."""
        self.add(entries)

    def touch(self, *paths: Sequence[ChunkKey]) -> None:
        """A request used these paths again, each from its first chunk on. Unknown keys are ignored:
        a chunk may have been lost meanwhile."""
        self._now += sum(map(len, paths))
        for path in paths:
            for key in path:
                node = self._nodes.get(key)
                if node is not None:
                    node.uses += 1
                    node.used = self._now
                    if key not in self._children:
                        self._joining[key] = node

    def remove(self, key: ChunkKey) -> None:
        """A chunk was evicted, lost or forgotten. Raises ``KeyError`` if it is unknown."""
        node = self._nodes.pop(key)
        self._leave_queue(node)
        parent = node.entry.parent
        self._children[parent] -= 1
        if not self._children[parent]:
            del self._children[parent]
            if parent in self._nodes:
                self._joining[parent] = self._nodes[parent]

    def study(self) -> Study | None:
        """The work of learning that is due now, if any. A policy that nobody asks learns in the
        calls above."""
        return None

    @abstractmethod
    def _rank(self, node: Node) -> Rank:
        """Its rank if it joined the queue now."""

    def _is_outdated(self) -> bool:
        """Whether the ranks of queued chunks have changed so much that they are needed again."""
        return False

    def _leave_queue(self, node: Node) -> None:
        node.version = -1
        self._joining.pop(node.entry.key, None)

    def _settle(self) -> None:
        """Puts the chunks that have joined where their ranks belong; if ranks are outdated, all."""
        joining = list(self._joining.values())
        self._joining.clear()
        for node in joining:
            self._versions += 1
            node.version = self._versions
        if self._is_outdated():
            queued = [node for _, version, node in self._heap if version == node.version]
            self._heap = [(self._rank(node), node.version, node) for node in queued + joining]
            heapify(self._heap)
            return
        for node in joining:
            heappush(self._heap, (self._rank(node), node.version, node))
        if len(self._heap) > 2 * len(self._nodes) + 64:
            self._heap = [place for place in self._heap if place[1] == place[2].version]
            heapify(self._heap)
