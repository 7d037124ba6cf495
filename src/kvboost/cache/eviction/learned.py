"""An eviction policy that learns which chunks are used again, and how soon."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import log2

from kvboost.cache.eviction.policy import Entry, EvictionPolicy, Node, Rank, Study
from kvboost.cache.eviction.return_rates import Cells, ReturnModel, log_bin
from kvboost.tokens.hashing import ChunkKey


@dataclass(eq=False, slots=True)
class _Visit:
    """One request's use of a path."""

    time: int
    request: int
    """The request's number; -1 if it is not known."""
    length: int = 0
    fresh: int = 0
    """Chunks never seen before."""
    turn: int = 0
    """The number of requests that it continues, each of which shares more than half of the one
    before."""
    fork_uses: int = 0
    """The number of uses of the last chunk that it shares with earlier requests."""
    unshared: int | None = None
    """The chunks of the last request that used this chunk which it does not share."""
    pause: int | None = None
    """Time since the request that it continues, as a logarithm."""
    quickness: float = 0.0
    """From the kinds that all of its chunks have in common."""
    fitted: int = -1
    """The fit of the model that ``quickness`` is from; -1 if the visit has changed since."""


@dataclass(eq=False, slots=True)
class _Memory:
    """The facts that are remembered of a chunk, even after it has left."""

    visit: _Visit
    depth: int
    uses: int = 1
    usual_gap: float | None = None
    """Time between its uses, as a logarithm; later ones weigh more. A new chunk starts with its
    parent's."""
    density: float = 0.0
    """The cost that a use of it saves, per byte."""
    credit: float = 0.0
    """Its density plus the credit of what had been evicted by its last use: valuable chunks stay
    longer, but not for ever (GreedyDual)."""
    probe: int = -1


class LearnedPolicy(EvictionPolicy):
    """Keeps the chunks that are most likely to be used again soon, weighed by size and cost.

    :class:`ReturnModel` learns while serving how soon chunks are used again, from a few chunks of
    every request (*probes*): the rate over the time since the last use, and a factor for each kind
    of chunk. Kinds are how often and how regularly a chunk was used, where in its request it is,
    how long that request was, how much of it was new, and how and how soon it continued earlier
    ones. Evicted chunks are remembered for a while, so that a return that comes too late counts.

    Until the model has predicted returns better than recency, and whenever it no longer does,
    chunks are evicted least recently used first, with expensive and small chunks staying longer. So
    traffic without any pattern is served as by LRU, and a scan over new text evicts little else.
    """

    PROBES = 4
    """The number per request, of one of its paths: the last chunk and others at random."""
    PATIENCE = 4
    """Chunks that are used, for each one that is queued, before the queue is sorted again."""
    HISTORY = 16
    """The number of evicted chunks that are remembered for each chunk in the tier."""
    MIN_HISTORY = 256

    def __init__(self) -> None:
        super().__init__()
        self._memories: dict[ChunkKey, _Memory] = {}
        self._left: OrderedDict[ChunkKey, None] = OrderedDict()
        self._model = ReturnModel(self.PROBES)
        self._random = random.Random(0)
        self._request = 0
        """The number of the newest request."""
        self._probed: tuple[_Visit, list[ChunkKey]] | None = None
        """One of its paths, of which some chunks become probes."""
        self._inflation = 0.0
        self._queued_at = 0
        self._queued_fit = 0

    @property
    def is_trusted(self) -> bool:
        """Whether the model decides the order, and not recency."""
        return self._model.is_trusted

    def add(self, entries: Sequence[Entry]) -> None:
        if not entries:
            return
        visit = self._visit_after(entries[0].parent)
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
        if self._probed is None:
            self._probed = visit, []
        if self._probed[0] is visit:
            self._probed[1].extend(entry.key for entry in entries)

    def restore(self, entries: Sequence[Entry]) -> None:
        for number, entry in enumerate(entries, 1):
            self._left.pop(entry.key, None)
            memory = _Memory(_Visit(self._now + number, request=-1, length=1), depth=0)
            memory.density = self._density(entry)
            memory.credit = self._inflation + memory.density
            self._memories[entry.key] = memory
        super().add(entries)

    def touch(self, *paths: Sequence[ChunkKey]) -> None:
        known = [here for path in paths if (here := [key for key in path if key in self._nodes])]
        if not known:
            return
        self._begin()
        super().touch(*paths)
        use, memories, inflation = self._use, self._memories, self._inflation
        probed = self._random.choice(known)
        for path in known:
            visit = _Visit(self._now, self._request, len(path))
            for depth, key in enumerate(path):
                memory = memories[key]
                use(memory, visit, depth)
                memory.credit = inflation + memory.density
            if path is probed:
                self._probed = visit, path

    def remove(self, key: ChunkKey) -> None:
        super().remove(key)
        self._inflation = max(self._inflation, self._memories[key].credit)
        self._left[key] = None
        while len(self._left) > self.HISTORY * len(self._nodes) + self.MIN_HISTORY:
            forgotten, _ = self._left.popitem(last=False)
            self._model.lost(self._memories.pop(forgotten).probe, self._now)

    def study(self) -> Study | None:
        return self._study() if self._model.is_due() else None

    def _study(self) -> Study:
        fitted, now = self._model.to_fit(), self._now

        def fit() -> partial[None]:
            fitted.fit(now)
            return partial(self._model.adopt, fitted)

        return fit

    def _begin(self) -> None:
        """Begins a new request. The one before is complete: some of its chunks become probes."""
        probed, self._probed = self._probed, None
        self._request += 1
        if probed is None:
            return
        visit, keys = probed
        for number in range(min(self.PROBES, len(keys))):
            key = keys[-1] if number == 0 else keys[self._random.randrange(len(keys))]
            memory = self._memories.get(key)
            if memory is not None and memory.visit is visit and memory.probe < 0:
                cells = _visit_cells(visit) + _own_cells(memory)
                memory.probe = self._model.watch(cells, visit.time)
        if self._model.is_due(late=True):
            self._study()()()

    def _visit_after(self, parent: ChunkKey) -> _Visit:
        """The visit whose new chunks follow ``parent``: the one of the newest request that ended
        there, or a new one."""
        before = self._memories.get(parent) if parent in self._nodes else None
        if before is not None and before.visit.request == self._request:
            return before.visit
        self._begin()
        length = 0 if before is None else before.depth + 1
        return _Visit(self._now, self._request, length)

    def _use(self, memory: _Memory, visit: _Visit, depth: int) -> None:
        """``visit`` uses a chunk again; called for all chunks of the visit, the first one first."""
        earlier = memory.visit
        gap = log2(1 + visit.time - earlier.time)
        memory.usual_gap = gap if memory.usual_gap is None else (memory.usual_gap + gap) / 2
        memory.uses += 1
        memory.visit, memory.depth = visit, depth
        if memory.probe >= 0:
            self._model.used(memory.probe, visit.time)
            memory.probe = -1
        if earlier is not visit:
            visit.fork_uses = memory.uses
            unshared = earlier.length - depth - 1
            visit.unshared = unshared if unshared > 0 else 0
            continues = unshared <= depth + 1
            visit.turn = earlier.turn + 1 if continues else 0
            visit.pause = int(gap) if continues else None

    def _density(self, entry: Entry) -> float:
        return entry.cost / max(1, entry.nbytes)

    def _rank(self, node: Node) -> Rank:
        memory = self._memories[node.entry.key]
        model, visit = self._model, memory.visit
        if not model.is_trusted:
            return memory.credit, node.used
        if visit.fitted != model.fits:
            visit.quickness = model.quickness(_visit_cells(visit))
            visit.fitted = model.fits
        own = model.quickness(_own_cells(memory), NUM_VISIT_CELLS)
        worth = model.worth(visit.quickness + own, self._now - visit.time)
        return memory.density * worth, node.used

    def _is_outdated(self) -> bool:
        """Ranks change with time. They are computed again when ``PATIENCE`` times as many chunks
        were used as are queued, and when the model has learned."""
        has_learned = self._queued_fit != self._model.fits
        if has_learned or self._now - self._queued_at >= self.PATIENCE * len(self._heap):
            self._queued_at, self._queued_fit = self._now, self._model.fits
            return True
        return False


def _visit_cells(visit: _Visit) -> Cells:
    """The kinds that all chunks of a visit have in common."""
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
    """The kinds of a chunk in addition to those of its visit."""
    return (
        log_bin(memory.uses - 1, 2),
        log_bin(memory.visit.length - memory.depth - 1, 1),
        None if memory.usual_gap is None else int(memory.usual_gap),
    )
