"""The ``kvboost`` object of an answer: the source of every row of its prompt."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from kvboost.results import ReuseReport, SpanKind

Decode = Callable[[Sequence[int]], str]


def counts(reuse: ReuseReport) -> dict[str, int]:
    """Rows by source. ``moved_tokens`` includes ``recomputed_tokens``."""
    return {
        "exact_tokens": reuse.count(SpanKind.EXACT),
        "approximate_tokens": reuse.count(SpanKind.APPROXIMATE),
        "moved_tokens": reuse.count(SpanKind.MOVED),
        "recomputed_tokens": len(reuse.recomputed),
        "computed_tokens": reuse.count(SpanKind.COMPUTE),
    }


def spans(
    reuse: ReuseReport, prompt_ids: Sequence[int], decode: Decode | None = None
) -> list[dict[str, Any]]:
    """The spans of a prompt, with their text if ``decode`` is given."""
    shown = []
    recomputed = reuse.recomputed
    for span in reuse.spans:
        again = 0
        if span.kind is SpanKind.MOVED:
            again = bisect_left(recomputed, span.end) - bisect_left(recomputed, span.start)
        one = {
            "kind": span.kind.value,
            "start": span.start,
            "end": span.end,
            "tokens": span.num_tokens,
            "recomputed": again,
            "donor": span.donor,
            "tier": span.tier,
            "resemblance": span.resemblance,
        }
        if decode is not None:
            one["text"] = decode(prompt_ids[span.start : span.end])
        shown.append(one)
    return shown
