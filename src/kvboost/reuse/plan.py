"""The plan of a prompt: what serves each of its rows."""

from __future__ import annotations

import sys
from bisect import bisect_right, insort
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvboost.cache.chunk import Lineage
from kvboost.cache.lookup.hits import Hit, KnownRows, MovedRun
from kvboost.config import LEAST_MOVED
from kvboost.results import Span, SpanKind

LEAST_TOKENS = 16
"""A shorter exact prefix is recomputed: it would cost the fastest kernel and save nothing."""
LIVE_TOKENS = 16
"""The last rows of a prompt are always computed: the answer depends on them most, and their
attention shows which moved rows matter."""


@dataclass(frozen=True)
class Plan:
    """How a prompt of ``num_tokens`` is served: ``in_place`` hits serve at their own positions, and
    ``moved`` runs, which come after them, do not overlap. Both are in order."""

    num_tokens: int
    in_place: tuple[Hit, ...] = ()
    moved: tuple[MovedRun, ...] = ()

    num_shared: int = 0
    """The number of first rows that are in place already: shared with a running request, or in
    another engine's pages."""

    @property
    def exact_rows(self) -> int:
        """Rows before the first approximate or moved row. If there is none, the answer is exact
        too, and this is ``sys.maxsize``."""
        approximate = [hit.start for hit in self.in_place if hit.chunk.lineage is not Lineage.EXACT]
        return min([*approximate[:1], *(run.start for run in self.moved[:1])], default=sys.maxsize)

    @property
    def num_known(self) -> int:
        """Rows to copy into place, moved ones included."""
        return sum(hit.num_tokens for hit in self.in_place) + self.num_moved

    @property
    def num_moved(self) -> int:
        return sum(run.end - run.start for run in self.moved)

    def computed(self) -> list[range]:
        """The rows that are not known."""
        known = [(hit.start, hit.end) for hit in self.in_place]
        known += [(run.start, run.end) for run in self.moved]
        ranges, row = [], self.num_shared
        for start, end in [*known, (self.num_tokens, self.num_tokens)]:
            if start > row:
                ranges.append(range(row, start))
            row = max(row, end)
        return ranges

    @property
    def hits(self) -> tuple[Hit, ...]:
        """All hits to copy into place, in order."""
        return (*self.in_place, *(hit for run in self.moved for hit in run.hits))

    @property
    def spans(self) -> tuple[Span, ...]:
        """Cover the prompt from first to last token."""
        spans = [Span(SpanKind.COMPUTE, rows.start, rows.stop) for rows in self.computed()]
        if self.num_shared:
            spans.append(Span(SpanKind.EXACT, 0, self.num_shared, tier="shared"))
        for hit in self.in_place:
            kind = SpanKind(hit.chunk.lineage.value)
            spans.append(Span(kind, hit.start, hit.end, hit.chunk.key, hit.offset, tier=hit.tier))
        for run in self.moved:
            for hit in run.hits:
                of_chunk = hit.chunk.key, hit.offset, run.resemblance, hit.tier
                spans.append(Span(SpanKind.MOVED, hit.start, hit.end, *of_chunk))
        return tuple(sorted(spans, key=lambda span: span.start))

    def without_moved(self) -> Plan:
        """The same plan, with the moved runs computed instead."""
        return replace(self, moved=())


def make_plan(num_tokens: int, known: KnownRows, num_shared: int = 0) -> Plan:
    """The plan by which ``known`` serves a prompt of ``num_tokens``, whose first ``num_shared``
    rows are in place already. Hits that would save less than they cost are left out. ::

    0                                                             num_tokens
    |--exact--|--exact--|--compute--|--moved--|--moved--|--compute--|
    """
    known = known.after(num_shared)
    # A few approximate rows would make every row after them approximate too.
    continues = sum(hit.num_tokens for hit in known.approximate) >= LEAST_MOVED
    in_place = (*known.exact, *(known.approximate if continues else ()))
    if in_place and in_place[-1].end < LEAST_TOKENS:
        in_place = ()
    return Plan(num_tokens, in_place, choose(known.moved), num_shared)


def choose(runs: Sequence[MovedRun]) -> tuple[MovedRun, ...]:
    """Chooses among overlapping ``runs`` so that few rows are left to compute: the longest run
    first, then what it leaves free of the others. Between runs of about the same length, a donor
    that was read after more of the same text goes first, and last go an approximate one and one
    that is not in memory."""

    def worth(run: MovedRun) -> float:
        worth = (run.end - run.start) * (1 + 0.1 * run.resemblance) * (1.0 if run.is_exact else 0.9)
        return 0.8 * worth if any(hit.is_slow for hit in run.hits) else worth

    chosen: list[MovedRun] = []
    taken: list[tuple[int, int]] = []  # the intervals of the chosen runs, in order
    for run in sorted(runs, key=worth, reverse=True):
        for start, end in _free(run, taken):
            chosen.append(run.clip(start, end))
            insort(taken, (start, end))
    return tuple(sorted(chosen, key=lambda run: run.start))


def _free(run: MovedRun, taken: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of ``run`` that are not ``taken`` and are long enough to be worth moving."""
    start, last = run.start, run.end
    free = []
    for begin, end in taken[max(0, bisect_right(taken, (start, last)) - 1) :]:
        if begin >= last:
            break
        if begin - start >= LEAST_MOVED:
            free.append((start, begin))
        start = max(start, end)
    return [*free, (start, last)] if last - start >= LEAST_MOVED else free
