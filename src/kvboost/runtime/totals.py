"""Totals over all requests."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from kvboost.config import GenerationMode
from kvboost.results import SpanKind
from kvboost.runtime.request import RequestState
from kvboost.tokens.chunking import fixed


class Totals:
    """Thread-safe. Computed rows count as misses: one for each ``chunk_size`` rows."""

    def __init__(self, chunk_size: int) -> None:
        self._chunk_size = chunk_size
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    def add(self, state: RequestState) -> None:
        """Counts a request that has ended."""
        kinds = Counter(span.kind for span in state.reuse.spans)
        computed = len(fixed(state.reuse.count(SpanKind.COMPUTE), self._chunk_size))
        with self._lock:
            if state.request.mode is not GenerationMode.BASELINE:
                self._counts["exact_hits"] += kinds[SpanKind.EXACT]
                self._counts["approximate_hits"] += kinds[SpanKind.APPROXIMATE]
                self._counts["moved_hits"] += kinds[SpanKind.MOVED]
                self._counts["misses"] += computed
            self._counts["requests"] += 1
            self._counts["prompt_tokens"] += state.reuse.prompt_tokens
            self._counts["cached_tokens"] += state.reuse.cached_tokens
            self._counts["recomputed_tokens"] += len(state.reuse.recomputed)
            for kind in (SpanKind.EXACT, SpanKind.APPROXIMATE, SpanKind.MOVED):
                self._counts[f"{kind.value}_tokens"] += state.reuse.count(kind)
            self._counts["generated_tokens"] += len(state.token_ids)

    def stats(self) -> dict[str, Any]:
        with self._lock:
            counts = Counter(self._counts)
        approximate = counts["approximate_hits"] + counts["moved_hits"]
        hits = counts["exact_hits"] + approximate
        lookups = hits + counts["misses"]
        prompt = counts["prompt_tokens"]
        return {
            "cache_hits": hits,
            "approximate_hits": approximate,
            "cache_misses": counts["misses"],
            "hit_rate": hits / lookups if lookups else 0.0,
            "exact_hit_rate": counts["exact_hits"] / lookups if lookups else 0.0,
            "requests": counts["requests"],
            "prompt_tokens": prompt,
            "exact_tokens": counts["exact_tokens"],
            "approximate_tokens": counts["approximate_tokens"],
            "moved_tokens": counts["moved_tokens"],
            "recomputed_tokens": counts["recomputed_tokens"],
            "token_reuse_rate": counts["cached_tokens"] / prompt if prompt else 0.0,
            "generated_tokens": counts["generated_tokens"],
        }
