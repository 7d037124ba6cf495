"""The plan of a prompt: spans that cover it from first to last token."""

from __future__ import annotations

import sys
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from kvboost.cache.lookup.hits import Hit, KnownRows, MovedRun
from kvboost.results import Span, SpanKind

LEAST_TOKENS = 16
"""A shorter beginning is read again: its rows ride along for nothing."""
LEAST_MOVED = 32
"""A shorter moved run is read again: it would be repaired for a good part, and hardly saves."""
LIVE_TOKENS = 16
"""The last rows of a prompt are always computed: they are what the answer hangs on, and they say
which moved rows matter."""


@dataclass(frozen=True)
class Plan:
    """``spans`` cover the prompt. ``in_place`` serve where they stand, ``moved`` runs do not
    overlap; both are in order."""

    spans: tuple[Span, ...]
    in_place: tuple[Hit, ...] = ()
    moved: tuple[MovedRun, ...] = ()

    num_shared: int = 0
    """So many of the first rows are in place already, shared with a request that is running."""

    @property
    def exact_rows(self) -> int:
        """Rows before the first that is approximate or moved: they are exact, and without one
        everything that follows the prompt is."""
        inexact = (SpanKind.APPROXIMATE, SpanKind.MOVED)
        return next((span.start for span in self.spans if span.kind in inexact), sys.maxsize)

    @property
    def num_tokens(self) -> int:
        return self.spans[-1].end

    @property
    def num_known(self) -> int:
        """Rows to be put in place, moved ones included."""
        return sum(hit.num_tokens for hit in self.in_place) + self.num_moved

    @property
    def num_moved(self) -> int:
        return sum(run.end - run.start for run in self.moved)

    def computed(self) -> Iterator[range]:
        for span in self.spans:
            if span.kind is SpanKind.COMPUTE:
                yield range(span.start, span.end)

    @property
    def hits(self) -> tuple[Hit, ...]:
        """Everything that is put in place, in order."""
        return (*self.in_place, *(hit for run in self.moved for hit in run.hits))

    def without_moved(self) -> Plan:
        """The same prompt with its moved runs computed."""
        return _cover(self.num_tokens, self.in_place, (), self.num_shared)


def make_plan(num_tokens: int, known: KnownRows, num_shared: int = 0) -> Plan:
    """How ``known`` serves a prompt of ``num_tokens``, whose first ``num_shared`` are in place.
    What would save less than it costs is left out. ::

    0                                                             num_tokens
    |--exact--|--exact--|--compute--|--moved--|--moved--|--compute--|
    """
    known = known.after(num_shared)
    # A few approximate rows would make everything behind them approximate too.
    goes_on = sum(hit.num_tokens for hit in known.approximate) >= LEAST_MOVED
    in_place = (*known.exact, *(known.approximate if goes_on else ()))
    if in_place and in_place[-1].end < LEAST_TOKENS:
        in_place = ()
    return _cover(num_tokens, in_place, choose(known.moved), num_shared)


def choose(runs: Sequence[MovedRun]) -> tuple[MovedRun, ...]:
    """Of overlapping ``runs`` those that leave as few rows to compute as possible: the longest
    first, of the others what it leaves free. Between runs of about the same length, a donor that
    was read behind more of the same text goes first, and one that is approximate itself last; a
    run that holds a whole passage is worth more than parts of two."""

    def worth(run: MovedRun) -> float:
        return (run.end - run.start) * (1 + 0.1 * run.resemblance) * (1.0 if run.is_exact else 0.9)

    chosen: list[MovedRun] = []
    taken: list[tuple[int, int]] = []  # what they hold, in order
    for run in sorted(runs, key=worth, reverse=True):
        for start, end in list(_free(run, taken)):
            chosen.append(run.clip(start, end))
            insort(taken, (start, end))
    return tuple(sorted(chosen, key=lambda run: run.start))


def _free(run: MovedRun, taken: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """The parts of ``run`` that nobody has ``taken`` and that are long enough to be worth it."""
    start, last = run.start, run.end
    first = max(0, bisect_right(taken, (start, last)) - 1)
    for begin, end in [*takewhile(lambda one: one[0] < last, taken[first:]), (last, last)]:
        if begin - start >= LEAST_MOVED:
            yield start, begin
        start = max(start, end)


def _cover(
    num_tokens: int, in_place: tuple[Hit, ...], moved: tuple[MovedRun, ...], num_shared: int
) -> Plan:
    spans: list[Span] = []
    if num_shared:
        spans.append(Span(SpanKind.EXACT, 0, num_shared, tier="shared"))

    def compute_until(row: int) -> None:
        known = spans[-1].end if spans else 0
        if row > known:
            spans.append(Span(SpanKind.COMPUTE, known, row))

    for hit in in_place:
        kind = SpanKind(hit.chunk.lineage.value)
        spans.append(Span(kind, hit.start, hit.end, hit.chunk.key, hit.offset, tier=hit.tier))
    for run in moved:
        compute_until(run.start)
        spans += [
            Span(
                SpanKind.MOVED,
                hit.start,
                hit.end,
                hit.chunk.key,
                hit.offset,
                run.resemblance,
                hit.tier,
            )
            for hit in run.hits
        ]
    compute_until(num_tokens)
    return Plan(tuple(spans), in_place, moved, num_shared)
