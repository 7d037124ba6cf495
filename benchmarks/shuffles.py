"""``python -m benchmarks shuffles``: does reuse decay over a long stream of ever new orders?

Every request draws some of the same documents in a new order, and the cache is bounded. What a
request leaves, rows over moved text included, is what the next ones reuse. Counted are the rows
that are not computed, the rows that are computed at the seams between known documents, and, every
few requests, the deviation from full prefill.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from random import Random
from typing import Any, ClassVar

from rich.table import Table

from kvboost import GenerationMode, KVBoost, SpanKind
from kvboost.bench.kit.benchmark import Bench, ModelSettings, Report, option
from kvboost.bench.kit.tables import dim, table
from kvboost.bench.quality.asked import Comparison
from kvboost.bench.texts.questions import make_questions
from kvboost.config import EngineConfig
from kvboost.model.loading.load import LoadedModel
from kvboost.progress import Progress

GROUPS = 5
"""The stream is shown in so many parts."""
COLUMNS = dim(
    """reused     rows of the prompt that were not computed
moved      rows of the prompt that were moved; exact: rows that were exact hits
paid       what repair cost per moved row
seam       rows of known documents that were computed without being chosen, per document
KL         deviation from full prefill, of the requests that were compared"""
)


@dataclass(frozen=True, kw_only=True)
class Settings(ModelSettings):
    QUICK: ClassVar = {"requests": 20, "documents": 6, "drawn": 3, "every": 10}

    requests: int = option(100, "Requests of the stream.", least=GROUPS)
    documents: int = option(12, "Documents that requests draw from.", least=2)
    drawn: int = option(6, "Documents of a request.", least=2)
    words: int = option(120, "Words of a document.", least=60)
    room: float = option(3.0, "Size of the cache, in copies of all documents.", least=0.5)
    every: int = option(5, "Every so many requests one is compared with full prefill.", least=1)
    answer_tokens: int = option(8, "The most tokens of an answer.", least=1)
    seed: int = option(0, "Other orders.", least=0)

    def tokens_read(self) -> float:
        prompt = self.drawn * self.words * 1.5
        return prompt * self.requests * (0.4 + 2 / self.every)


@dataclass(frozen=True)
class Served:
    """One request of the stream."""

    number: int
    reused: float
    moved: float
    exact: float
    charged: float
    seam_rows: float
    """Rows of known documents that were computed, but not chosen for repair, per document."""
    cached_bytes: int
    kl: float | None


def run(settings: Settings, bench: Bench) -> Report:
    loaded = bench.load_model()
    with (
        Progress(f"{settings.requests} requests, ever new orders") as progress,
        progress.step("served", settings.requests) as step,
    ):
        served = list(measure(loaded, settings, step.advance))
    known = served[1:]  # nothing was known to the first
    return Report(
        {
            "requests": [asdict(one) for one in served],
            "seam_rows": statistics.mean(one.seam_rows for one in known),
            "reused_first": _mean(known[: len(known) // GROUPS], "reused"),
            "reused_last": _mean(known[-(len(known) // GROUPS) :], "reused"),
        },
        [COLUMNS, stream_table(served)],
    )


def measure(
    loaded: LoadedModel, settings: Settings, on_request: Callable[[], None] = lambda: None
) -> Iterator[Served]:
    rng = Random(settings.seed)
    (made,) = make_questions(
        1, seed=settings.seed, num_passages=settings.documents, words_per_passage=settings.words
    )
    documents = [text.strip() + "\n\n" for text in made.passages]
    ask = f"Question: {made.question}\nAnswer in a few words."
    with KVBoost(loaded, EngineConfig()) as engine:
        tokens = sum(len(engine.encode(text)) for text in documents)
        row_bytes = loaded.forward.shape.row_bytes
    config = EngineConfig(
        max_cache_bytes=round(settings.room * tokens * row_bytes),
        gpu_cache_bytes=0,
        reuse_moved="always",
        heal="off",
    )
    with KVBoost(loaded, config) as engine:
        seen: set[int] = set()
        for number in range(settings.requests):
            drawn = rng.sample(range(settings.documents), settings.drawn)
            chosen = [documents[one] for one in drawn]
            yield _serve(engine, settings, number, chosen, ask, len(seen & set(drawn)))
            seen |= set(drawn)
            on_request()


def _serve(
    engine: KVBoost,
    settings: Settings,
    number: int,
    documents: Sequence[str],
    ask: str,
    num_known: int,
) -> Served:
    prompt, other = (
        engine.arrange(None, documents, text, cache_salt="none").prompt
        for text in (ask, "Summarize this.")
    )
    kl = None
    if number % settings.every == settings.every - 1:
        tokens, baseline = settings.answer_tokens, GenerationMode.BASELINE
        answer = engine.generate(prompt, tokens, baseline).token_ids
        full = engine.score(prompt, answer, baseline).logits
        kl = Comparison.of(full, engine.score(prompt, answer).logits).kl
    result = engine.generate(prompt, settings.answer_tokens)
    # The two prompts are the same up to the end of the documents.
    end = next(row for row, pair in enumerate(zip(prompt, other, strict=False)) if len({*pair}) > 1)
    computed = sum(
        min(span.end, end) - span.start
        for span in result.spans
        if span.kind is SpanKind.COMPUTE and span.start < end
    )
    all_known = num_known == len(documents)
    reuse = result.reuse
    return Served(
        number,
        reused=reuse.kv_reuse_ratio,
        moved=reuse.count(SpanKind.MOVED) / len(prompt),
        exact=reuse.count(SpanKind.EXACT) / len(prompt),
        charged=reuse.charged_share,
        seam_rows=computed / len(documents) if all_known else 0.0,
        cached_bytes=round(engine.cache_stats()["hot_memory_mb"] * 1e6),
        kl=kl,
    )


def _mean(served: Sequence[Any], name: str) -> float:
    return float(statistics.mean(getattr(one, name) for one in served))


def stream_table(served: Sequence[Served]) -> Table:
    """The stream in parts, the first request apart."""
    rest = served[1:]
    edges = [len(rest) * part // GROUPS for part in range(GROUPS + 1)]
    parts = [rest[low:high] for low, high in pairwise(edges)]
    rows = []
    for part in ([served[0]], *parts):
        kl = [one.kl for one in part if one.kl is not None]
        rows.append(
            [
                f"{part[0].number + 1}–{part[-1].number + 1}" if len(part) > 1 else "1",
                *(f"{_mean(part, name):.1%}" for name in ("reused", "moved", "exact", "charged")),
                f"{_mean(part, 'seam_rows'):.1f}",
                f"{part[-1].cached_bytes / 1e6:,.1f}",
                f"{statistics.mean(kl):.4f} ({len(kl)})" if kl else "–",
            ]
        )
    headings = ("reused", "moved", "exact", "paid", "seam", "MB", "KL")
    return table("a stream of ever new orders", ("requests",), headings, rows)
