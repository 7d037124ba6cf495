"""Time to first token: full prefill by stock transformers, ours without and with reuse, and the
floor, which is stock transformers with the KV already in its cache. And one decode step.

There are two kinds of reuse: ``warm`` finds the text at its place (exact hits); ``chunk`` finds it
after other words than when it was read, so it is moved and repaired.

The clock runs outside: from the call with token ids until its first token is on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvboost import GenerationMode, KVBoost, StockModel
from kvboost.bench.kit.record import as_json
from kvboost.bench.kit.timing import Contender, Sample, interleave
from kvboost.bench.texts.prompts import PATTERNS, fragments, question

DECODE_TOKENS = 24
TOGETHER = 8
"""Answers that are decoded at once."""
OPENING_TOKENS = 8
CONTENDERS = ("stock", "baseline", "warm", "chunk", "floor")
RATIOS = ("warm_over_floor", "baseline_over_stock", "speedup", "chunk_speedup")


@dataclass(frozen=True)
class TTFT:
    """One row: a prompt of ``num_tokens`` of which ``num_new`` are new."""

    pattern: str
    num_tokens: int
    num_new: int
    stock: Sample
    baseline: Sample
    warm: Sample
    chunk: Sample
    floor: Sample

    @property
    def warm_over_floor(self) -> float:
        return self.warm.median_ms / self.floor.median_ms

    @property
    def baseline_over_stock(self) -> float:
        return self.baseline.median_ms / self.stock.median_ms

    @property
    def speedup(self) -> float:
        return self.stock.median_ms / self.warm.median_ms

    @property
    def chunk_speedup(self) -> float:
        return self.stock.median_ms / self.chunk.median_ms

    def as_json(self) -> dict[str, object]:
        return as_json(self, *RATIOS)


@dataclass(frozen=True)
class Pooled:
    """All patterns of one length together: ratios of summed medians, steadier than single ones."""

    num_tokens: int
    baseline_over_stock: float
    warm_over_floor: float
    speedup: float
    chunk_speedup: float

    @classmethod
    def of(cls, rows: Sequence[TTFT]) -> Pooled:
        stock, baseline, warm, chunk, floor = (
            sum(getattr(row, name).median_ms for row in rows) for name in CONTENDERS
        )
        ratios = baseline / stock, warm / floor, stock / warm, stock / chunk
        return cls(rows[0].num_tokens, *ratios)


@dataclass(frozen=True)
class Decode:
    """Milliseconds per generated token after a known prompt of ``num_tokens``."""

    num_tokens: int
    stock: Sample
    ours: Sample
    together: Sample
    """Ours, with ``TOGETHER`` answers at once."""

    @property
    def ours_over_stock(self) -> float:
        return self.ours.median_ms / self.stock.median_ms

    @property
    def together_gain(self) -> float:
        return self.ours.median_ms / self.together.median_ms

    def as_json(self) -> dict[str, object]:
        return as_json(self, "ours_over_stock", "together_gain")


def measure_ttft(
    engine: KVBoost,
    stock: StockModel,
    pattern: str,
    num_tokens: int,
    num_new: int = 32,
    rounds: int = 7,
    on_round: Callable[[], None] = lambda: None,
) -> TTFT:
    """All of ``CONTENDERS`` on prompts that begin with the same text and end in a new question.
    For ``chunk``, an opening of the same length precedes it, a new one every time."""
    encode = fragments(engine.encode)
    shared = PATTERNS[pattern].shared(encode, num_tokens - num_new)
    tails = [question(encode, number, num_new) for number in range(rounds + 1)]
    openings = [question(encode, number, OPENING_TOKENS) for number in range(rounds + 2)]
    exact, moved = f"exact-{len(shared)}", f"moved-{len(shared)}"
    engine.warm(shared, cache_salt=exact)
    engine.warm(openings.pop() + shared, cache_salt=moved)
    cache = stock.prefill(shared)
    reused: set[int] = set()

    def warm(number: int) -> None:
        prompt = shared + tails[number]
        result = engine.generate(prompt, 1, GenerationMode.PREFIX_CACHE, cache_salt=exact)
        reused.add(result.cached_tokens)

    def chunk(number: int) -> None:
        prompt = openings[number] + shared[:-OPENING_TOKENS] + tails[number]
        engine.generate(prompt, 1, cache_salt=moved, keep=False)

    times = interleave(
        {
            "stock": Contender(lambda n: stock.next_token(shared + tails[n])),
            "baseline": Contender(
                lambda n: engine.generate(shared + tails[n], 1, GenerationMode.BASELINE)
            ),
            "warm": Contender(warm),
            "chunk": Contender(chunk),
            "floor": Contender(
                lambda n: stock.next_token(tails[n], cache),
                after=lambda: stock.rewind(cache, num_new),
            ),
        },
        rounds,
        on_round,
    )
    engine.forget_salt(exact)
    engine.forget_salt(moved)
    assert reused == {len(shared)}, "every round finds all but the new tokens"
    return TTFT(pattern, num_tokens, num_new, **times)


def measure_decode(
    engine: KVBoost,
    stock: StockModel,
    num_tokens: int,
    rounds: int = 5,
    on_round: Callable[[], None] = lambda: None,
) -> Decode:
    """Whole calls over known prompts, divided by the tokens they gave. Prompts that are answered
    together differ in their ends."""
    encode = fragments(engine.encode)
    prompt = PATTERNS["rag"].shared(encode, num_tokens)
    several = [
        prompt[:-OPENING_TOKENS] + question(encode, number, OPENING_TOKENS)
        for number in range(TOGETHER)
    ]
    how: dict[str, Any] = {
        "mode": GenerationMode.PREFIX_CACHE,
        "cache_salt": f"decode-{num_tokens}",
        "ignore_eos": True,
    }
    for known in (prompt, *several):
        engine.warm(known, cache_salt=how["cache_salt"])
    cache = stock.prefill(prompt[:-1])

    times = interleave(
        {
            "stock": Contender(
                lambda _: stock.generate(prompt, DECODE_TOKENS, cache),
                after=lambda: stock.rewind(cache, DECODE_TOKENS),
            ),
            "ours": Contender(lambda _: engine.generate(prompt, DECODE_TOKENS, **how)),
            "together": Contender(lambda _: engine.generate_batch(several, DECODE_TOKENS, **how)),
        },
        rounds,
        on_round,
    )
    engine.forget_salt(how["cache_salt"])
    per_token = {name: sample.per(DECODE_TOKENS) for name, sample in times.items()}
    per_token["together"] = per_token["together"].per(TOGETHER)
    return Decode(num_tokens, **per_token)


def break_even(full: Mapping[int, float], reuse: Mapping[int, float]) -> int | None:
    """The shortest measured length from which ``reuse`` is always faster than reading in
    ``full``; both are milliseconds by length. None if it is slower at the longest."""
    found = None
    for length in sorted(set(full) & set(reuse), reverse=True):
        if reuse[length] >= full[length]:
            break
        found = length
    return found


def break_evens(rows: Sequence[TTFT]) -> dict[str, int | None]:
    """Tokens from which each kind of reuse beats a full prefill by the same engine."""
    times = {
        name: {row.num_tokens: getattr(row, name).median_ms for row in rows} for name in CONTENDERS
    }
    full = {"warm": "baseline", "chunk": "baseline", "floor": "stock"}
    return {name: break_even(times[slow], times[name]) for name, slow in full.items()}
