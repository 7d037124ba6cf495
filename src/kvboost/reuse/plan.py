"""The plan of a prompt: spans that cover it from first to last token."""

from __future__ import annotations

from collections.abc import Sequence

from kvboost.cache.store import Hit
from kvboost.results import Span, SpanKind

LEAST_TOKENS = 16
"""A shorter beginning is read again: its rows ride along for nothing, and a prompt computed from
its first token on takes the fastest attention."""


def exact_prefix(num_tokens: int, hits: Sequence[Hit]) -> tuple[Span, ...]:
    """Spans of a prompt of ``num_tokens`` that begins with ``hits``; the rest is computed. Hits
    that would save less than they cost are left out. ::

    0                            num_tokens
    |--exact--|--exact--|--compute--|
    """
    spans = [
        Span(SpanKind.EXACT, hit.start, hit.start + hit.num_tokens, donor=hit.chunk.key)
        for hit in hits
    ]
    known = spans[-1].end if spans else 0
    if known < LEAST_TOKENS:
        return (Span(SpanKind.COMPUTE, 0, num_tokens),)
    return (*spans, Span(SpanKind.COMPUTE, known, num_tokens))
