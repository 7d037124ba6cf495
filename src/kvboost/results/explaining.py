"""Makes explanations: of a plan's facts, and of what the cache still knows when it is asked."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvboost.config import LEAST_MOVED
from kvboost.results.explanation import (
    MEANINGS,
    Divergence,
    Explanation,
    Part,
    Why,
    cells,
    duration,
)
from kvboost.results.reuse import MovedRows, PlanFacts, ReuseReport
from kvboost.results.spans import SpanKind

Decode = Callable[[Sequence[int]], str]
SHOWN_TOKENS = 48
"""Tokens of a text that are shown, at its beginning and at its end."""


@dataclass(frozen=True)
class GoneRows:
    """Rows ``[start, end)`` of a prompt whose chunk was in the cache."""

    start: int
    end: int
    how: str
    """``"evicted"``, ``"forgotten"`` or ``"lost"``."""
    at: float
    """When it went, in seconds since 1970."""


@dataclass(frozen=True)
class Traces:
    """The cache's reasons for rows that it did not serve, when it is asked later."""

    gone: tuple[GoneRows, ...] = ()
    elsewhere: tuple[tuple[int, int], ...] = ()
    """Rows ``[start, end)`` that are cached at other positions."""
    other_salts: tuple[tuple[int, int], ...] = ()
    """Rows that are cached under other salts or adapters."""
    before: tuple[tuple[int, ...], ...] = ()
    """For each donor: the tokens before it, where it was computed; empty if they are gone."""


Trace = Callable[..., Traces]
"""``ChunkStore.trace`` of a prompt; see there for its arguments."""


def explain(
    report: ReuseReport,
    token_ids: Sequence[int],
    decode: Decode,
    trace: Trace,
    *,
    other_salts: bool,
) -> Explanation:
    """Explains how a prompt was served; with ``other_salts``, also what other salts have cached."""
    facts = report.facts
    assert facts is not None  # every plan has some
    ends = [span.end for span in report.spans]
    donors = [report.spans[bisect_right(ends, one.start)] for one in facts.moved]
    in_place = (SpanKind.EXACT, SpanKind.APPROXIMATE)
    traces = trace(
        facts.root,
        at=facts.at,
        row=facts.prefix,
        path=[(one.donor, one.end) for one in report.spans if one.donor and one.kind in in_place],
        donors=[(one.donor, one.offset) for one in donors],
        elsewhere=facts.refusal in ("mode", "model") and facts.cacheable > 0,
        other_salts=other_salts,
    )
    reasons = _reasons(report, facts, traces)
    writer = _Writer(report, facts, traces, token_ids, decode)
    return Explanation(
        tuple(writer.part(start, end, kind, why) for start, end, kind, why in reasons),
        _divergence(facts, traces, token_ids, decode),
        report.notes,
        cells(report.spans, report.recomputed),
    )


def _reasons(
    report: ReuseReport, facts: PlanFacts, traces: Traces
) -> Iterator[tuple[int, int, SpanKind, Why]]:
    """The parts of a prompt in order, with their reasons. Neighbours of one kind and reason are one
    part; each moved run is one."""
    why = _computed(facts, traces, report.prompt_tokens)
    moved = {run.start: run for run in facts.moved}
    for kind, group in groupby(report.spans, lambda span: span.kind):
        spans = list(group)
        start, end = spans[0].start, spans[-1].end
        if kind is SpanKind.EXACT:
            yield start, end, kind, Why.PREFIX
        elif kind is SpanKind.APPROXIMATE:
            yield start, end, kind, Why.PAST
        elif kind is SpanKind.MOVED:
            while start < end:
                run = moved[start]
                yield start, run.end, kind, Why.MOVED
                start = run.end
        else:
            for reason, rows in groupby(range(start, end), why.__getitem__):
                numbers = list(rows)
                yield numbers[0], numbers[-1] + 1, kind, _REASONS[reason]


_REASONS = tuple(Why)
_REFUSALS = {"mode": Why.MODE, "model": Why.MODEL, "slower": Why.SLOWER, "": Why.SHORT}


def _computed(facts: PlanFacts, traces: Traces, total: int) -> bytearray:
    """For each row why it would be computed, as a place in ``_REASONS``. The last reason counts."""
    painted = bytearray([_REASONS.index(Why.NEW)]) * total

    def paint(rows: Sequence[tuple[int, int]], why: Why) -> None:
        for start, end in rows:
            end = min(end, total)
            painted[start:end] = bytes([_REASONS.index(why)]) * max(0, end - start)

    refusal = _REFUSALS[facts.refusal]
    paint(traces.other_salts, Why.SALT)
    paint(traces.elsewhere, refusal)
    paint(facts.left, refusal)
    paint([(one.start, one.end) for one in traces.gone], Why.GONE)
    paint([(0, facts.prefix)], Why.SHORT)
    if facts.prefix == facts.last:
        paint([(facts.prefix, total)], Why.LAST)
    known = [*facts.left, *((run.start, run.end) for run in facts.moved)]
    if facts.movable and any(end == facts.movable for _, end in known):
        paint([(facts.movable, total)], Why.LAST)
    if facts.cacheable < total:
        paint([(facts.cacheable, total)], Why.MODE if facts.refusal == "mode" else Why.MODEL)
    return painted


@dataclass
class _Writer:
    """Writes the parts of one explanation."""

    _report: ReuseReport
    _facts: PlanFacts
    _traces: Traces
    _ids: Sequence[int]
    _decode: Decode

    def part(self, start: int, end: int, kind: SpanKind, why: Why) -> Part:
        tiers = dict.fromkeys(
            span.tier
            for span in self._report.spans
            if span.tier is not None and span.start < end and span.end > start
        )
        text = self._text(start, end)
        if why is not Why.MOVED:
            detail = self._detail(start, end, why)
            return Part(start, end, kind, why, detail, text, tiers=tuple(tiers))
        number, run = next(one for one in enumerate(self._facts.moved) if one[1].start == start)
        rows = self._report.recomputed
        recomputed = bisect_left(rows, end) - bisect_left(rows, start)
        then = self._traces.before[number] if self._traces.before else ()
        before = self._decode(then) if then else None
        now = self._decode(self._ids[max(0, start - SHOWN_TOKENS) : start])
        facts = (tuple(tiers), run.distance, round(run.rows_changed, 1), before, now)
        return Part(start, end, kind, why, _moved(run, recomputed), text, recomputed, *facts)

    def _detail(self, start: int, end: int, why: Why) -> str:
        facts, said = self._facts, MEANINGS[why]
        match why:
            case Why.GONE:
                rows = [one for one in self._traces.gone if one.start < end and one.end > start]
                ways = dict.fromkeys(f"{one.how} {duration(facts.at - one.at)}" for one in rows)
                return f"{said}, {' and '.join(ways)} before this prompt"
            case Why.SHORT if start < facts.prefix:
                return "cached, but so short a piece is computed as fast as it is reused"
            case Why.SLOWER if facts.costs is not None:
                unit = " ms" if facts.costs_are_ms else " rows"
                moving, computing = (f"{cost:,.1f}{unit}" for cost in facts.costs)
                costs = f"{moving} expected for the prompt, against {computing} to compute it"
                return f"{said}: {costs}"
            case Why.MODE:
                return f"mode {facts.mode} does not reuse it"
        return said

    def _text(self, start: int, end: int) -> str:
        if end - start <= 2 * SHOWN_TOKENS:
            return self._decode(self._ids[start:end])
        first = self._decode(self._ids[start : start + SHOWN_TOKENS])
        return f"{first} … {self._decode(self._ids[end - SHOWN_TOKENS : end])}"


def _moved(run: MovedRows, recomputed: int) -> str:
    same = 1 - run.rows_changed / max(1, run.rows_before)
    where = "at its own position"
    if run.distance:
        where = f"moved {'on' if run.distance > 0 else 'back'} by {abs(run.distance):,}"
    again = f"; {recomputed:,} rows computed again" if recomputed else ""
    before = f"at least {same:.0%} of the text before it is the same"
    if run.rows_before < LEAST_MOVED:
        before = "too little text is before it to compare"
    return f"cached after other text, {where}; {before}{again}"


def _divergence(
    facts: PlanFacts, traces: Traces, token_ids: Sequence[int], decode: Decode
) -> Divergence | None:
    """Where the prompt leaves the cached text. None if cached text ends there."""
    common = 0
    for there, here in zip(facts.follows, token_ids[facts.prefix :], strict=False):
        if there != here:
            break
        common += 1
    else:
        return None
    row, old = facts.prefix + common, facts.follows[common:]
    text = decode(token_ids[:row])
    sides = _first_lines(decode(token_ids[row : row + SHOWN_TOKENS]), decode(old))
    return Divergence(
        row,
        text.count("\n") + 1,
        text.rpartition("\n")[2],
        *sides,
        _replaced(facts, traces, row, [*token_ids[:row], *old]),
    )


def _replaced(
    facts: PlanFacts, traces: Traces, row: int, cached: list[int]
) -> tuple[int, int] | None:
    """The numbers of tokens from ``row`` on that were replaced in the ``cached`` text, and by how
    many, if the text after them follows in both. The cached text is known only so far."""
    for run, before in zip(facts.moved, traces.before, strict=False):
        if run.end <= row or not before:
            continue
        start = run.start - run.distance
        if start > len(cached) or tuple(cached[:start][-len(before) :]) != before:
            return None
        both = max(0, row - start)  # an insertion may end as what is before it does
        return start + both - row, run.start + both - row
    return None


def _first_lines(left: str, right: str) -> tuple[str, str]:
    """The first lines of two texts, as many as it takes to tell them apart."""
    lefts, rights = left.splitlines(), right.splitlines()
    for number in range(1, max(len(lefts), len(rights)) + 1):
        first = "\n".join(lefts[:number]), "\n".join(rights[:number])
        if first[0] != first[1]:
            return first
    return left, right
