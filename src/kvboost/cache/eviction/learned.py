"""The eviction policy that learns which chunks come back, and how soon."""

from __future__ import annotations

import math
import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from kvboost.cache.eviction.policy import Entry, LeafQueuePolicy, Node, Rank
from kvboost.cache.eviction.return_rates import Cells, ReturnModel, log_bin
from kvboost.tokens.hashing import ChunkKey


@dataclass(eq=False, slots=True)
class _Visit:
    """One request's way along a path, as far as it is known."""

    time: int
    length: int = 0
    fresh: int = 0
    """Chunks never seen before."""
    turn: int = 0
    """Requests before it that it goes on from, each by more than half of the one before."""
    fork_uses: int = 0
    """How often the last chunk it has in common with earlier ones was used."""
    unshared: int | None = None
    """How much of the request that used that chunk before it left out."""
    pause: int | None = None
    """Time since the request it goes on from, as a logarithm."""
    quickness: float = 0.0
    """By the kinds that all of its chunks are of."""
    fitted: int = -1
    """The fit of the model that ``quickness`` is from; -1: none since the visit changed."""


@dataclass(eq=False, slots=True)
class _Memory:
    """What is remembered of a chunk, also when it has left."""

    visit: _Visit
    depth: int
    uses: int = 1
    usual_gap: float | None = None
    """Between its uses, as a logarithm; the later ones weigh more. A new chunk takes over its
    parent's."""
    density: float = 0.0
    """What a use of it saves, per byte."""
    credit: float = 0.0
    """Its density, on top of the credit of what had left by its last use: so what is worth more
    stays longer, but not for ever (GreedyDual)."""
    probe: int = -1
    worth: float = 0.0
    fitted: int = -1
    """The fit of the model that ``worth`` is from; -1: none since the last use."""
    holds_until: float = 0.0


class LearnedPolicy(LeafQueuePolicy):
    """Keeps what is likeliest to come back soon, for its bytes and for what it would cost.

    How soon chunks come back is learned while serving, by :class:`ReturnModel`, from a few chunks
    of every request (*probes*): the curve over the time since the last use, and how much faster
    chunks of each kind are. Kinds are how often and how regularly a chunk was used, where in its
    request it stands, how long that request was, how much of it was new, and how and how soon it
    went on from earlier ones. What has left is remembered too, for a while, so that a return too
    late counts.

    Until the model has shown that it foresees returns better than recency does, and whenever it
    no longer does, the order is that of the least recently used, with chunks that cost more or
    take less room staying longer. So traffic without any pattern is served as LRU serves it, and
    a scan over new text only passes through.

    ``use_importance`` multiplies what a chunk is worth with its :attr:`Entry.importance`.
    """

    PROBES = 4
    """Of every request: its last chunk and others at random."""
    HISTORY = 16
    """Chunks that left are remembered, up to so many for each that is here."""
    MIN_HISTORY = 256

    def __init__(self, *, use_importance: bool = False) -> None:
        super().__init__()
        self._use_importance = use_importance
        self._memories: dict[ChunkKey, _Memory] = {}
        self._left: OrderedDict[ChunkKey, None] = OrderedDict()
        self._model = ReturnModel(self.PROBES)
        self._random = random.Random(0)
        self._request: tuple[_Visit, list[ChunkKey]] = (_Visit(0), [])
        self._inflation = 0.0
        self._queued_at = 0
        self._queued_fit = 0

    @property
    def is_trusted(self) -> bool:
        """Whether the order is the model's and not that of the least recently used."""
        return self._model.is_trusted

    @property
    def num_remembered(self) -> int:
        """Chunks that left and are remembered."""
        return len(self._left)

    def add(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        visit = self._visit_behind(entries[0].parent)
        visit.time = self._now + len(entries)
        visit.length += len(entries)
        visit.fitted = -1
        before = self._memories.get(entries[0].parent)
        for depth, entry in enumerate(entries, visit.length - len(entries)):
            memory = self._memories.get(entry.key)
            if memory is None:
                visit.fresh += 1
                gap = before.usual_gap if before is not None else None
                memory = self._memories[entry.key] = _Memory(visit, depth, usual_gap=gap)
            else:
                del self._left[entry.key]
                self._use(memory, visit, depth)
            memory.density = self._density(entry)
            memory.credit = self._inflation + memory.density
            before = memory
        super().add(entries)
        self._request[1].extend(entry.key for entry in entries)
        self._keep_in_order()

    def restore(self, entries: Sequence[Entry]) -> None:
        for number, entry in enumerate(entries, 1):
            self._left.pop(entry.key, None)
            memory = _Memory(_Visit(self._now + number, length=1), depth=0)
            memory.density = self._density(entry)
            memory.credit = self._inflation + memory.density
            self._memories[entry.key] = memory
        super().add(entries)
        self._keep_in_order()

    def touch(self, path: Sequence[ChunkKey]) -> None:
        known = [key for key in path if key in self._nodes]
        if not known:
            return
        visit = self._begin(self._now + len(path))
        visit.length = len(known)
        for depth, key in enumerate(known):
            memory = self._memories[key]
            self._use(memory, visit, depth)
            memory.credit = self._inflation + memory.density
        super().touch(path)
        self._request[1].extend(known)
        self._keep_in_order()

    def remove(self, key: ChunkKey) -> None:
        super().remove(key)
        self._inflation = max(self._inflation, self._memories[key].credit)
        self._left[key] = None
        while len(self._left) > self.HISTORY * len(self._nodes) + self.MIN_HISTORY:
            forgotten, _ = self._left.popitem(last=False)
            self._model.lost(self._memories.pop(forgotten).probe, self._now)

    def _begin(self, time: int) -> _Visit:
        """A new request. The one before is complete: some of its chunks become probes."""
        visit, keys = self._request
        for number in range(min(self.PROBES, len(keys))):
            key = keys[-1] if number == 0 else keys[self._random.randrange(len(keys))]
            memory = self._memories.get(key)
            if memory is not None and memory.visit is visit and memory.probe < 0:
                cells = _visit_cells(visit) + _own_cells(memory)
                memory.probe = self._model.watch(cells, visit.time, self._now)
        self._request = (_Visit(time), [])
        return self._request[0]

    def _visit_behind(self, parent: ChunkKey) -> _Visit:
        """The request whose new chunks follow ``parent``: the one that just ended there."""
        before = self._memories.get(parent) if parent in self._nodes else None
        if before is not None and before.visit is self._request[0]:
            before.fitted = -1  # it is the last of its request no longer
            return before.visit
        visit = self._begin(self._now)
        if before is not None:
            visit.length = before.depth + 1
        return visit

    def _use(self, memory: _Memory, visit: _Visit, depth: int) -> None:
        """A chunk is used again, by ``visit``; called for all of its chunks, first one first."""
        earlier = memory.visit
        gap = math.log2(1 + max(0, visit.time - earlier.time))
        memory.usual_gap = gap if memory.usual_gap is None else (memory.usual_gap + gap) / 2
        memory.uses += 1
        memory.visit, memory.depth, memory.fitted = visit, depth, -1
        if memory.probe >= 0:
            self._model.used(memory.probe, visit.time)
            memory.probe = -1
        if earlier is not visit:
            visit.fork_uses = memory.uses
            visit.unshared = max(0, earlier.length - depth - 1)
            visit.turn = earlier.turn + 1 if 2 * (depth + 1) >= earlier.length else 0
            visit.pause = int(gap) if visit.turn else None

    def _density(self, entry: Entry) -> float:
        density = entry.cost / max(1, entry.nbytes)
        return density * entry.importance if self._use_importance else density

    def _rank(self, node: Node) -> Rank:
        memory = self._memories[node.entry.key]
        if not self._model.is_trusted:
            return memory.credit, node.used
        fits = self._model.fits
        if memory.fitted != fits or memory.holds_until <= self._now:
            visit = memory.visit
            if visit.fitted != fits:
                visit.quickness = self._model.quickness(_visit_cells(visit))
                visit.fitted = fits
            own = self._model.quickness(_own_cells(memory), NUM_VISIT_CELLS)
            worth, until = self._model.worth(visit.quickness + own, self._now - visit.time)
            memory.worth, memory.holds_until = memory.density * worth, visit.time + until
            memory.fitted = fits
        return memory.worth, node.used

    def _keep_in_order(self) -> None:
        """Ranks change with time. They are taken anew when a quarter as many chunks were used as
        stand in line, so that each use pays for four, and when the model has learned. Few of them
        did change, so that is cheap."""
        is_due = 4 * (self._now - self._queued_at) >= len(self._line)
        if is_due or self._queued_fit != self._model.fits:
            self._queued_at, self._queued_fit = self._now, self._model.fits
            self._queue_again()


def _visit_cells(visit: _Visit) -> Cells:
    """The kinds that all chunks of a visit are of."""
    fresh = min(31, log_bin(visit.fresh, 1.5))
    return (
        fresh,
        fresh + (32 if visit.turn else 0),
        log_bin(visit.turn, 2),
        log_bin(visit.length - 1, 1),
        log_bin(visit.fork_uses, 1),
        None if visit.unshared is None else log_bin(visit.unshared, 1.5),
        visit.pause,
    )


NUM_VISIT_CELLS = 7


def _own_cells(memory: _Memory) -> Cells:
    """The kinds that a chunk is of beside those of its visit."""
    return (
        log_bin(memory.uses - 1, 2),
        log_bin(memory.visit.length - memory.depth - 1, 1),
        None if memory.usual_gap is None else int(memory.usual_gap),
    )
