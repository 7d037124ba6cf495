"""Moved text against the clock: passages in new orders, and conversations that began with them."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass

from kvboost import GenerationMode, KVBoost, SpanKind, StockModel
from kvboost.bench.timing import Contender, Sample, interleave
from kvboost.bench.workloads import PATTERNS, fragments, question
from kvboost.results import kl_divergence

STRATEGIES = ("auto", "cacheblend", "none")
TURNS = 5
TURN_TOKENS = 32
ANSWER_TOKENS = 24


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
    """A prompt of which nothing is known, in the same mode."""

    @property
    def over_stock(self) -> dict[str, float]:
        stock = self.stock.median_ms
        names = (*STRATEGIES, "no_hit")
        return {name: getattr(self, name).median_ms / stock for name in names}

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "over_stock": self.over_stock}


@dataclass(frozen=True)
class Turn:
    """One turn of a conversation: the median over several, begun with moved and exact passages."""

    number: int
    moved_ms: float
    exact_ms: float
    moved_kl: float
    """How far the answer's distributions lie from a full prefill's."""
    repaired_tokens: float
    """Moved rows of this turn; only the first should have any."""


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
    """Passages that were read behind a header, in a new order every round."""
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
        def run(number: int) -> None:
            result = engine.generate(
                prompt(number),
                1,
                cache_salt=salt,
                recompute_strategy=strategy,
                recompute_ratio=ratio,
                keep=False,
            )
            moved_tokens.add(result.moved_tokens)

        return Contender(run)

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
    """Conversations of several turns over passages: begun with them in another order than they
    were read in, and begun with all of it new."""
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
    """A short header and passages of exactly so many tokens."""
    encode = fragments(engine.encode)
    header = encode("Answer from the passages below and from nothing else.\n\n")
    text = PATTERNS["rag"].shared(encode, (num_passages + 1) * passage_tokens)[passage_tokens:]
    starts = range(0, num_passages * passage_tokens, passage_tokens)
    return header, [text[start : start + passage_tokens] for start in starts]
