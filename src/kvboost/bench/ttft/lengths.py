"""From short to long prompts: where reading less begins to pay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from kvboost import KVBoost, StockModel
from kvboost.bench.timing import Sample
from kvboost.bench.ttft.patterns import CONTENDERS, OPENING_TOKENS, time_reuse
from kvboost.bench.workloads import PATTERNS, Encode, fragments

PATTERN = "rag"
WORDS = (100, 250, 500, 1_000, 2_000, 4_000, 8_000)


@dataclass(frozen=True)
class Length:
    """A prompt of so many words, all but the last ``num_new`` tokens of it read before."""

    words: int
    num_tokens: int
    times: Mapping[str, Sample]

    def as_json(self) -> dict[str, object]:
        return {**asdict(self), "times": {name: asdict(one) for name, one in self.times.items()}}


@dataclass(frozen=True)
class Beginning:
    """The first ``words`` words of the pattern."""

    words: int
    ids: list[int]


def beginnings(encode: Encode, words: Iterable[int], most_tokens: int | None) -> list[Beginning]:
    """Shared text by number of words, shortest first. What has more than ``most_tokens`` is cut
    to them, once: the longest prompt the model can read."""
    found: list[Beginning] = []
    for count in sorted(words):
        text = _first_words(count)
        ids = encode(text)
        if most_tokens is not None and len(ids) > most_tokens:
            share = most_tokens / len(ids)
            found.append(Beginning(round(count * share), ids[:most_tokens]))
            break
        found.append(Beginning(count, ids))
    return found


def measure_lengths(
    engine: KVBoost,
    stock: StockModel,
    texts: Sequence[Beginning],
    num_new: int = 32,
    rounds: int = 5,
    on_round: Callable[[], None] = lambda: None,
) -> list[Length]:
    """Every length, with the contenders of the pattern table."""
    return [
        Length(
            text.words,
            len(text.ids) + num_new,
            time_reuse(engine, stock, text.ids, num_new, rounds, on_round),
        )
        for text in texts
    ]


def texts_for(engine: KVBoost, words: Sequence[int], num_new: int) -> list[Beginning]:
    limit = engine.context_length
    room = None if limit is None else limit - max(num_new, OPENING_TOKENS) - 1
    return beginnings(fragments(engine.encode), words, room)


def break_even(full: Mapping[int, float], reuse: Mapping[int, float]) -> int | None:
    """The shortest measured length from which on ``reuse`` is always faster than reading in
    ``full``; both are milliseconds by length. None if it is not so at the longest."""
    found = None
    for length in sorted(set(full) & set(reuse), reverse=True):
        if reuse[length] >= full[length]:
            break
        found = length
    return found


def break_evens(points: Sequence[Length]) -> dict[str, int | None]:
    """Tokens from which each kind of reuse beats a full prefill by the same engine."""
    times = {
        name: {point.num_tokens: point.times[name].median_ms for point in points}
        for name in CONTENDERS
    }
    full = {"warm": "baseline", "chunk": "baseline", "floor": "stock"}
    return {name: break_even(times[slow], times[name]) for name, slow in full.items()}


def _first_words(count: int) -> str:
    kept: list[str] = []
    left = count
    for piece in PATTERNS[PATTERN].text():
        number = len(piece.split())
        if number >= left:
            kept.append(_cut(piece, left))
            return "".join(kept)
        kept.append(piece)
        left -= number
    raise ValueError(f"{PATTERN} has fewer than {count:,} words of text")


def _cut(text: str, words: int) -> str:
    """As much of ``text`` as has so many words, spaces and lines as they are."""
    end = 0
    for word in text.split()[:words]:
        end = text.index(word, end) + len(word)
    return text[:end]
