"""What keeping KV in fewer bits gives up: exact hits and moved text in 16, 8 and 4 bits.

Every question is answered once by full prefill. Then each precision serves the same prompt, known
as a whole (``exact``) or passage by passage (the donor kinds of ``quality``), and what it makes of
the full model's own answer is compared with what the full model makes of it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone

from rich.console import Console
from rich.table import Table

from kvboost import GenerationMode, KVBoost
from kvboost.bench.machine import describe
from kvboost.bench.quality import Asked, Setting
from kvboost.bench.questions import Question, choose_questions, make_questions
from kvboost.config import KV_BITS, EngineConfig
from kvboost.model.load import load
from kvboost.progress import Progress
from kvboost.results import kl_divergence

EXACT = "exact"
RATIO = 0.15


@dataclass(frozen=True)
class BitsRow:
    """One question, served from one precision in one way."""

    question: str
    bits: int
    served: str
    tokens: int
    agreeing: int
    """Of the answer's tokens: how many stay the likeliest."""
    kl: float


@dataclass(frozen=True)
class BitsSummary:
    bits: int
    served: str
    questions: int
    top1: float
    mean_kl: float
    same_text: float
    bytes_per_token: float


def measure_bits(
    engines: Mapping[int, KVBoost],
    questions: Sequence[Question],
    donors: Sequence[str],
    setting: Setting,
    on_cell: Callable[[], None] = lambda: None,
) -> Iterator[BitsRow]:
    """Every question, precision and way. The engines share one model."""
    first = next(iter(engines.values()))
    for number, question in enumerate(questions):
        other = questions[(number + 1) % len(questions)]
        if other is question:
            other = make_questions(1, seed=1)[0]
        asked = Asked(first, question, other, setting, seed=number)
        for bits, engine in engines.items():
            here = asked.through(engine)
            for way in (EXACT, *donors):
                salt = f"bits-{way}"
                if way == EXACT:
                    mode = GenerationMode.PREFIX_CACHE
                    engine.generate(asked.prompt, 1, mode, cache_salt=salt)
                    scored = engine.score(asked.prompt, asked.answer, mode, cache_salt=salt)
                else:
                    here.read_before(way, salt)
                    scored = engine.score(
                        asked.prompt, asked.answer, cache_salt=salt, recompute_ratio=RATIO
                    )
                agree = asked.logits.argmax(-1) == scored.logits.argmax(-1)
                kl = float(kl_divergence(asked.logits, scored.logits).mean())
                yield BitsRow(
                    question.question, bits, way, len(agree), int(agree.sum()), max(0.0, kl)
                )
                engine.forget_salt(salt)
                on_cell()


def summarize(rows: Sequence[BitsRow], bytes_per_token: Mapping[int, float]) -> list[BitsSummary]:
    """Rows by precision and way, in the order they came."""
    groups: dict[tuple[int, str], list[BitsRow]] = {}
    for row in rows:
        groups.setdefault((row.bits, row.served), []).append(row)
    return [
        BitsSummary(
            bits,
            served,
            len(group),
            sum(row.agreeing for row in group) / sum(row.tokens for row in group),
            statistics.mean(row.kl for row in group),
            statistics.mean(row.agreeing == row.tokens for row in group),
            bytes_per_token[bits],
        )
        for (bits, served), group in groups.items()
    ]


def bits_table(summaries: Sequence[BitsSummary]) -> Table:
    table = Table(title="against full prefill, over its own answers")
    for heading in ("bits", "served from"):
        table.add_column(heading)
    for heading in ("questions", "top-1", "mean KL", "same text", "bytes/token"):
        table.add_column(heading, justify="right")
    for one in summaries:
        table.add_row(
            str(one.bits),
            one.served,
            str(one.questions),
            f"{one.top1:.1%}",
            f"{one.mean_kl:.4f}",
            f"{one.same_text:.0%}",
            f"{one.bytes_per_token:,.0f}",
        )
    return table


def run_bits(
    model: str,
    datasets: Sequence[str],
    donors: Sequence[str],
    setting: Setting,
    console: Console,
    *,
    limit: int | None = None,
    part: str = "1/1",
    device: str | None = None,
    dtype: str | None = None,
) -> dict[str, object]:
    """Every precision over one model, a table, and what a script wants."""
    questions = choose_questions(datasets, limit, part)
    loaded = load(model, device=device, dtype=dtype)
    engines = {
        bits: KVBoost(loaded, EngineConfig(kv_cache_bits=bits, reuse_moved="always"))
        for bits in KV_BITS
    }
    machine = describe(loaded.device, loaded.forward.shape.dtype)
    console.print(machine)
    total = len(questions) * len(engines) * (1 + len(donors))
    with (
        Progress(f"{len(questions)} questions, {len(donors)} donor kinds") as progress,
        progress.step("served", total) as step,
    ):
        rows = list(measure_bits(engines, questions, donors, setting, step.advance))
    sizes = {bits: _bytes_per_token(engine) for bits, engine in engines.items()}
    for engine in engines.values():
        engine.close()
    summaries = summarize(rows, sizes)
    console.print(bits_table(summaries))
    return {
        "benchmark": "bits",
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "model": model,
        "machine": machine,
        "summaries": [asdict(one) for one in summaries],
    }


def _bytes_per_token(engine: KVBoost) -> float:
    """Of whole chunks behind the first, as nearly all are."""
    size = engine.config.chunk_size
    ids = [number % 50 + 100 for number in range(3 * size)]
    engine.warm(ids[: 2 * size], cache_salt="bytes")
    before = engine.cache_stats()["hot_memory_mb"]
    engine.warm(ids, cache_salt="bytes")
    return float(engine.cache_stats()["hot_memory_mb"] - before) * 1e6 / size
