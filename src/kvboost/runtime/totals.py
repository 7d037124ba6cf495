"""Totals over all requests."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from kvboost.config import GenerationMode
from kvboost.results import SpanKind
from kvboost.runtime.request import RequestState
from kvboost.tokens.chunking import fixed

_SHOWN = (
    *("requests", "prompt_tokens", "exact_tokens", "approximate_tokens", "moved_tokens"),
    *("recomputed_tokens", "generated_tokens", "drafted_tokens", "accepted_tokens"),
)


class Totals:
    """Thread-safe. Computed rows count as misses: one for each ``chunk_size`` rows."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, state: RequestState) -> None:
        """Counts a request that has ended."""
        reuse = state.reuse
        kinds = Counter(span.kind for span in reuse.spans)
        computed = len(fixed(reuse.count(SpanKind.COMPUTE), self._chunk_size))
        with self._lock:
            if state.request.mode is not GenerationMode.BASELINE:
                self._counts["exact_hits"] += kinds[SpanKind.EXACT]
                self._counts["approximate_hits"] += kinds[SpanKind.APPROXIMATE]
                self._counts["approximate_hits"] += kinds[SpanKind.MOVED]
                self._counts["misses"] += computed
            self._counts["requests"] += 1
            self._counts["prompt_tokens"] += reuse.prompt_tokens
            self._counts["cached_tokens"] += reuse.cached_tokens
            self._counts["recomputed_tokens"] += len(reuse.recomputed)
            for kind in (SpanKind.EXACT, SpanKind.APPROXIMATE, SpanKind.MOVED):
                self._counts[f"{kind.value}_tokens"] += reuse.count(kind)
            self._counts["generated_tokens"] += len(state.token_ids)
            self._counts["drafted_tokens"] += state.drafted_tokens
            self._counts["accepted_tokens"] += state.accepted_tokens

    def as_dict(self) -> dict[str, Any]:
        """All requests so far. Hits are chunks that served rows, exact ones but for those on moved
        or approximate rows; misses are the chunks that the computed rows would fill. Drafted tokens
        were run by speculation; the accepted ones of them are tokens of answers."""
        with self._lock:
            counts = Counter(self._counts)
        hits = counts["exact_hits"] + counts["approximate_hits"]
        lookups = max(1, hits + counts["misses"])
        return {
            "cache_hits": hits,
            "approximate_hits": counts["approximate_hits"],
            "cache_misses": counts["misses"],
            "hit_rate": hits / lookups,
            "exact_hit_rate": counts["exact_hits"] / lookups,
            **{name: counts[name] for name in _SHOWN},
            "token_reuse_rate": counts["cached_tokens"] / max(1, counts["prompt_tokens"]),
        }
