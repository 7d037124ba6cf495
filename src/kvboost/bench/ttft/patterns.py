"""Time to first token: full prefill by stock transformers, ours without and with reuse, and the
floor, which is stock transformers with the KV already in its cache. And one decode step.

Reuse is of two kinds: ``warm`` finds the text where it was (exact hits), ``chunk`` finds it behind
other words than those it was read behind, so it is moved and repaired.

The clock runs outside: from the call with token ids until its first token is on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from kvboost import GenerationMode, KVBoost, StockModel
from kvboost.bench.timing import Contender, Sample, interleave
from kvboost.bench.workloads import PATTERNS, fragments, question

DECODE_TOKENS = 24
OPENING_TOKENS = 8
CONTENDERS = ("stock", "baseline", "warm", "chunk", "floor")


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
        ratios = {
            "warm_over_floor": self.warm_over_floor,
            "baseline_over_stock": self.baseline_over_stock,
            "speedup": self.speedup,
            "chunk_speedup": self.chunk_speedup,
        }
        return {**asdict(self), **ratios}


@dataclass(frozen=True)
class Pooled:
    """All patterns of one length together: ratios of summed medians, steadier than any single."""

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
    """Milliseconds per generated token behind a prompt of ``num_tokens`` that is known."""

    num_tokens: int
    stock: Sample
    ours: Sample

    @property
    def ours_over_stock(self) -> float:
        return self.ours.median_ms / self.stock.median_ms

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "ours_over_stock": self.ours_over_stock}


def measure_ttft(
    engine: KVBoost,
    stock: StockModel,
    pattern: str,
    num_tokens: int,
    num_new: int = 32,
    rounds: int = 7,
    on_round: Callable[[], None] = lambda: None,
) -> TTFT:
    encode = fragments(engine.encode)
    shared = PATTERNS[pattern].shared(encode, num_tokens - num_new)
    times = time_reuse(engine, stock, shared, num_new, rounds, on_round)
    return TTFT(pattern, num_tokens, num_new, **times)


def time_reuse(
    engine: KVBoost,
    stock: StockModel,
    shared: list[int],
    num_new: int,
    rounds: int,
    on_round: Callable[[], None],
) -> dict[str, Sample]:
    """All of ``CONTENDERS`` on prompts that begin with ``shared`` and end in a new question. For
    ``chunk`` an opening of the same length stands before it, a new one every time."""
    encode = fragments(engine.encode)
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
    return times


def measure_decode(
    engine: KVBoost,
    stock: StockModel,
    num_tokens: int,
    rounds: int = 5,
    on_round: Callable[[], None] = lambda: None,
) -> Decode:
    """Whole calls over a known prompt, divided by the tokens they gave."""
    prompt = PATTERNS["rag"].shared(fragments(engine.encode), num_tokens)
    salt = f"decode-{num_tokens}"
    engine.warm(prompt, cache_salt=salt)
    cache = stock.prefill(prompt[:-1])
    times = interleave(
        {
            "stock": Contender(
                lambda _: stock.generate(prompt, DECODE_TOKENS, cache),
                after=lambda: stock.rewind(cache, DECODE_TOKENS),
            ),
            "ours": Contender(
                lambda _: engine.generate(
                    prompt,
                    DECODE_TOKENS,
                    GenerationMode.PREFIX_CACHE,
                    cache_salt=salt,
                    ignore_eos=True,
                )
            ),
        },
        rounds,
        on_round,
    )
    engine.forget_salt(salt)
    per_token = {
        name: Sample(*(value / DECODE_TOKENS for value in asdict(sample).values()))
        for name, sample in times.items()
    }
    return Decode(num_tokens, **per_token)


def rounds_of(patterns: Sequence[str], lengths: Sequence[int], rounds: int) -> int:
    """How many rounds a run has, for its progress bar."""
    return (len(patterns) * len(lengths) + 1) * (rounds + 1)
