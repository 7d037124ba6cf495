"""Long answers summed up: their likeness to full prefill's, KL along them, and their code."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from kvboost.bench.kit.stats import paired_bootstrap
from kvboost.bench.quality.rows import LongAnswer, Row

TOKEN_GROUPS = ((0, 1), (1, 8), (8, 32), (32, 128), (128, 512), (512, 1 << 20))
"""The tokens of an answer whose KL is shown together."""


@dataclass(frozen=True)
class Mean:
    """A mean over questions, and the 95 % interval that resampling them gives."""

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        return cls(statistics.mean(values), *paired_bootstrap(values), len(values))


@dataclass(frozen=True)
class Both:
    """Which share of the answers is such, with reuse and with full prefill."""

    reused: float
    full: float
    difference: Mean

    @classmethod
    def of(cls, pairs: Iterable[tuple[bool | None, bool | None]]) -> Both | None:
        """None if it cannot be said of any answer."""
        known = [(one, full) for one, full in pairs if one is not None and full is not None]
        if not known:
            return None
        return cls(
            statistics.mean(float(one) for one, _ in known),
            statistics.mean(float(full) for _, full in known),
            Mean.of([float(one) - float(full) for one, full in known]),
        )


@dataclass(frozen=True)
class BesideFloor:
    """Beside a full prefill in bfloat16, on the questions that have both."""

    count: int
    likeness_share: float
    """Of the floor's likeness."""
    likeness_difference: Mean
    agreed_share: float
    """Of the tokens before the floor's first difference."""
    kl_ratio: float
    """To the floor's KL."""


@dataclass(frozen=True)
class LongSummary:
    task: str
    likeness: Mean
    no_passages_likeness: float
    agreed_tokens: float
    """Mean tokens before the first difference; all of an answer that stays the same."""
    kl_by_tokens: tuple[tuple[int, int, Mean], ...]
    """From which token to which, from 1, and the KL there."""
    parses: Both | None
    passes: Both | None
    floor: BesideFloor | None
    """None if it was not measured."""


def summarize_long(rows: Sequence[Row], floor: Mapping[str, Row]) -> LongSummary | None:
    """Of rows of one task and cell; None of questions. ``floor``: by question, bfloat16's row."""
    known = [(row, row.long) for row in rows if row.long is not None]
    if not known:
        return None
    answers = [answer for _, answer in known]
    return LongSummary(
        answers[0].task,
        Mean.of([answer.likeness for answer in answers]),
        statistics.mean(answer.no_passages_likeness for answer in answers),
        statistics.mean(_agreed(row) for row in rows),
        tuple(_kl_by_tokens(rows)),
        Both.of((answer.parses, answer.full_parses) for answer in answers),
        Both.of((answer.passes, answer.full_passes) for answer in answers),
        _beside(known, floor),
    )


def _agreed(row: Row) -> int:
    return len(row.kl_by_token) if row.first_difference is None else row.first_difference


def _kl_by_tokens(rows: Sequence[Row]) -> Iterable[tuple[int, int, Mean]]:
    longest = max(len(row.kl_by_token) for row in rows)
    for low, high in TOKEN_GROUPS:
        parts = [row.kl_by_token[low:high] for row in rows]
        if values := [statistics.mean(part) for part in parts if part]:
            yield low + 1, min(high, longest), Mean.of(values)


def _beside(
    known: Sequence[tuple[Row, LongAnswer]], floor: Mapping[str, Row]
) -> BesideFloor | None:
    pairs = [
        (row, answer, other, other.long)
        for row, answer in known
        if (other := floor.get(row.question)) is not None and other.long is not None
    ]
    if not pairs:
        return None
    differences = [answer.likeness - other.likeness for _, answer, _, other in pairs]

    def share(one: Iterable[float], other: Iterable[float]) -> float:
        return sum(one) / max(sum(other), 1e-12)

    return BesideFloor(
        len(pairs),
        share((one.likeness for _, one, _, _ in pairs), (one.likeness for *_, one in pairs)),
        Mean.of(differences),
        share((_agreed(one) for one, *_ in pairs), (_agreed(one) for _, _, one, _ in pairs)),
        share((one.kl for one, *_ in pairs), (one.kl for _, _, one, _ in pairs)),
    )
