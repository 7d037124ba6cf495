"""Moved text against the clock: passages in new orders by repair strategy, and conversations that
begin with them.

    python -m benchmarks moved [--model smollm2-135m] [--rounds 7] [--conversations 3]

Prints tables, and its record as JSON on the last line.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from kvboost import GenerationMode, KVBoost, SpanKind, StockModel
from kvboost.bench.kit.benchmark import ROUNDS, Bench, ModelSettings, Report, option
from kvboost.bench.kit.record import as_json
from kvboost.bench.kit.tables import spread, table
from kvboost.bench.kit.timing import Contender, Sample, interleave
from kvboost.bench.texts.prompts import PATTERNS, fragments, question
from kvboost.progress import Progress
from kvboost.results import kl_divergence

STRATEGIES = ("auto", "cacheblend", "none")
TURNS = 5
TURN_TOKENS = 32
ANSWER_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class Settings(ModelSettings):
    rounds: int = option(7, ROUNDS, least=1, most=50)
    conversations: int = option(3, "Conversations, of five turns each.", least=1)

    def tokens_read(self) -> float:
        return 2100 * 3 * (self.rounds + 1) + 1700 * 4 * TURNS * self.conversations


@dataclass(frozen=True)
class Moved:
    """Milliseconds until the first token of a prompt of ``num_tokens``, most of them moved."""

    num_tokens: int
    moved_tokens: int
    ratio: float
    stock: Sample
    auto: Sample
    cacheblend: Sample
    none: Sample
    no_hit: Sample
    """A prompt that was never read before, in the same mode."""

    @property
    def over_stock(self) -> dict[str, float]:
        stock = self.stock.median_ms
        names = (*STRATEGIES, "no_hit")
        return {name: getattr(self, name).median_ms / stock for name in names}


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation, begun with moved and with exact passages: medians."""

    number: int
    moved_ms: float
    exact_ms: float
    moved_kl: float
    """The distance of the answer's distributions from a full prefill's."""
    repaired_tokens: float
    """Moved rows of this turn; only the first turn should have any."""


def run(settings: Settings, bench: Bench) -> Report:
    with (
        bench.load_engine(reuse_moved="always") as engine,
        Progress("moved text, interleaved with stock transformers") as progress,
    ):
        stock = StockModel.from_pretrained(
            settings.model, device=settings.device, dtype=settings.dtype
        )
        with progress.step("passages in new orders", settings.rounds + 1) as step:
            moved = measure_moved(engine, stock, rounds=settings.rounds, on_round=step.advance)
        with progress.step("turns of conversations", settings.conversations * TURNS) as step:
            turns = measure_conversation(engine, settings.conversations, on_turn=step.advance)
    figures = {"moved": as_json(moved, "over_stock"), "turns": [asdict(turn) for turn in turns]}
    return Report(figures, [moved_table(moved), turns_table(turns)])


def measure_moved(
    engine: KVBoost,
    stock: StockModel,
    *,
    num_passages: int = 8,
    passage_tokens: int = 250,
    ratio: float = 0.15,
    rounds: int = 7,
    on_round: Callable[[], None] = lambda: None,
) -> Moved:
    """Passages that were read after a header, in a new order every round."""
    header, passages = _passages(engine, num_passages, passage_tokens)
    encode = fragments(engine.encode)
    salt = "moved"
    for passage in passages:
        engine.warm(header + passage, cache_salt=salt)
    moved_tokens: set[int] = set()

    def prompt(number: int, *, new: bool = False) -> list[int]:
        order = random.Random(number).sample(passages, num_passages)
        ids = header + [token for passage in order for token in passage]
        # The same tokens from the last to the first are text that was never read.
        return (ids[::-1] if new else ids) + question(encode, number, TURN_TOKENS)

    def serve(strategy: str) -> Contender:
        how: dict[str, Any] = {"recompute_strategy": strategy, "recompute_ratio": ratio}

        def ask(number: int) -> None:
            result = engine.generate(prompt(number), 1, cache_salt=salt, keep=False, **how)
            moved_tokens.add(result.moved_tokens)

        return Contender(ask)

    times = interleave(
        {
            "stock": Contender(lambda number: stock.next_token(prompt(number))),
            **{strategy: serve(strategy) for strategy in STRATEGIES},
            "no_hit": Contender(
                lambda number: engine.generate(prompt(number, new=True), 1, keep=False)
            ),
        },
        rounds,
        on_round,
    )
    engine.forget_salt(salt)
    return Moved(len(prompt(0)), max(moved_tokens), ratio, **times)


def measure_conversation(
    engine: KVBoost,
    conversations: int = 3,
    *,
    num_passages: int = 6,
    passage_tokens: int = 250,
    on_turn: Callable[[], None] = lambda: None,
) -> list[Turn]:
    """Conversations over passages: one begins with them in another order than they were read in,
    the other with all of it new."""
    header, passages = _passages(engine, num_passages, passage_tokens)
    encode = fragments(engine.encode)
    seen: list[list[tuple[float, float, float, int]]] = [[] for _ in range(TURNS)]
    for conversation in range(conversations):
        for passage in passages:
            engine.warm(header + passage, cache_salt="moved")
        order = random.Random(conversation).sample(passages, len(passages))
        talk = header + [token for passage in order for token in passage]
        for turn in range(TURNS):
            talk = talk + question(encode, turn, TURN_TOKENS)
            exact = engine.generate(
                talk, ANSWER_TOKENS, GenerationMode.PREFIX_CACHE, cache_salt="exact"
            )
            full, moved = (
                engine.score(talk, exact.token_ids, mode, cache_salt="moved").logits
                for mode in (GenerationMode.BASELINE, GenerationMode.CHUNK_KV_REUSE)
            )
            divergence = float(kl_divergence(full, moved).mean())
            served = engine.generate(talk, ANSWER_TOKENS, cache_salt="moved")
            repaired = served.reuse.count(SpanKind.MOVED)
            seen[turn].append((served.ttft_ms, exact.ttft_ms, divergence, repaired))
            talk = talk + served.token_ids
            on_turn()
        engine.forget_salt("moved")
        engine.forget_salt("exact")
    return [
        Turn(number, *(statistics.median(values) for values in zip(*turns, strict=True)))
        for number, turns in enumerate(seen, start=1)
    ]


def _passages(
    engine: KVBoost, num_passages: int, passage_tokens: int
) -> tuple[list[int], list[list[int]]]:
    """A short header, and passages of exactly so many tokens."""
    encode = fragments(engine.encode)
    header = encode("Answer from the passages below and from nothing else.\n\n")
    text = PATTERNS["rag"].shared(encode, (num_passages + 1) * passage_tokens)[passage_tokens:]
    starts = range(0, num_passages * passage_tokens, passage_tokens)
    return header, [text[start : start + passage_tokens] for start in starts]


def moved_table(moved: Moved) -> Table:
    samples = (moved.stock, moved.auto, moved.cacheblend, moved.none, moved.no_hit)
    return table(
        f"time to first token, ms: {moved.num_tokens:,} tokens, {moved.moved_tokens:,} of them "
        f"moved, {moved.ratio:.0%} of those recomputed",
        (),
        ("stock", *(name.replace("_", " ") for name in moved.over_stock)),
        [
            [spread(sample) for sample in samples],
            ["÷ stock", *(f"{ratio:.2f}" for ratio in moved.over_stock.values())],
        ],
    )


def turns_table(turns: Sequence[Turn]) -> Table:
    return table(
        "a conversation that began with moved passages, and the same one exact",
        (),
        ("turn", "moved, ms", "exact, ms", "KL to full prefill", "rows repaired"),
        [
            (
                str(turn.number),
                f"{turn.moved_ms:.0f}",
                f"{turn.exact_ms:.0f}",
                f"{turn.moved_kl:.4f}",
                f"{turn.repaired_tokens:g}",
            )
            for turn in turns
        ],
    )
