"""The plan of a prompt: spans that cover it from first to last token."""

from __future__ import annotations

from collections.abc import Sequence

from kvboost.cache.store import Hit
from kvboost.results import Span, SpanKind


def exact_prefix(num_tokens: int, hits: Sequence[Hit]) -> tuple[Span, ...]:
    """Spans of a prompt of ``num_tokens`` that begins with ``hits``; the rest is computed. ::

    0                            num_tokens
    |--exact--|--exact--|--compute--|
    """
    spans = [
        Span(SpanKind.EXACT, hit.start, hit.start + hit.num_tokens, donor=hit.chunk.key)
        for hit in hits
    ]
    known = spans[-1].end if spans else 0
    return (*spans, Span(SpanKind.COMPUTE, known, num_tokens))
