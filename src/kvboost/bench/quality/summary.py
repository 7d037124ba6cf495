"""Rows of ``kvboost quality`` summed up: figures, tables and a picture."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from kvboost.bench.kit.figures import Figure, draw_lines
from kvboost.bench.kit.stats import paired_bootstrap
from kvboost.bench.kit.tables import dim, ms, percent, table
from kvboost.bench.quality.long_summary import LongSummary, summarize_long
from kvboost.bench.quality.rows import DONORS, NOISE, NOISE_KINDS, Row
from kvboost.config import format_bytes

RATIO_FREE = ("none", "selective")
"""Strategies that no ratio changes: they run once."""
ROUNDING = 1e-6
"""A KL below this comes from the order of additions only; it is drawn as zero."""
ANSWERED_F1 = 0.5
"""Full prefill answers a question if its F1 is at least this."""
LEAST_GAP = 0.02
"""If passages gain less F1 than this, the share of it that is kept says nothing."""
TOKEN_GROUPS = ((0, 1), (1, 4), (4, 8), (8, 16))
"""The tokens of an answer whose KL is shown together."""
COLUMNS = dim(
    """ratio    share of moved rows that was recomputed (auto: at first)
paid     what repair cost per moved row, probes included
KL       deviation from full prefill over its answer: mean over questions, and median
top-1    tokens of the answer that stay the likeliest
same     questions with the very same greedy answer
at       where the others first differ, in tokens
F1/full  of the answers, with reuse and with full prefill
95 %     interval of the paired difference of F1
TTFT     time until the logits were there, as a share of full prefill's
hits     rows of the prompt that were not computed; B/token: bytes of a row in the cache
FLOPs    what repair cost, as a share of the arithmetic of computing all moved rows
90 %     90th percentile of KL over questions; then the mean KL of single tokens of the answer
answered F1 on the questions that full prefill answers
within   whether F1 is lower than full prefill's by less than --margin (one-sided, 95 %)
gap      share of the gap recovered, as KVShareArena defines it:
         (F1 - F1 without passages) / (F1 of full prefill - F1 without passages)
         and in KL: 1 - KL / KL without passages
layer-tokens  tokens of passages times layers that were computed, probes too
of       layer-tokens of a full prefill of the passages
KV       of the passages in the cache
ms       TTFT, and that of full prefill"""
)


@dataclass(frozen=True)
class Summary:
    """All rows of a strategy, a ratio, a donor kind and a way of keeping."""

    donor: str
    kept: str
    strategy: str
    ratio: float
    count: int
    mean_kl: float
    median_kl: float
    p90_kl: float
    kl_by_token: tuple[float, ...]
    """Mean over the questions whose answers are that long."""
    top1: float
    same_text: float
    first_difference: float | None
    f1: float | None
    """This, and what rests on it, is None of long answers."""
    full_f1: float | None
    f1_difference: tuple[float, float] | None
    """95 % interval of the mean paired difference."""
    f1_at_least: float | None
    """Lower end of the one-sided 95 % interval of the mean paired difference."""
    answered: int
    """The number of questions that full prefill answers."""
    answered_f1: float | None
    """On these questions."""
    gap_f1: float | None
    """The share of the gap recovered: 0 as without passages, 1 as full prefill."""
    gap_kl: float | None
    """One minus the mean KL as a share of the mean KL without passages."""
    ttft_ratio: float
    charged_share: float
    charged_flops: float
    hit_rate: float
    bytes_per_token: float
    ttft_ms: float
    """The median; this and the rest are 0 of rows that were saved before these were measured."""
    full_ttft_ms: float
    recomputed_layer_tokens: float
    dense_layer_tokens: float
    kv_bytes: float
    long: LongSummary | None = None
    """None of questions."""

    def is_within(self, margin: float) -> bool | None:
        """Whether F1 is not lower than full prefill's by ``margin``."""
        return None if self.f1_at_least is None else self.f1_at_least > -margin


def summarize(rows: Iterable[Row]) -> list[Summary]:
    """Rows by task, donor, way of keeping, strategy and ratio, in the order they came."""
    groups: dict[tuple[str, tuple[str, str, str, float]], list[Row]] = {}
    floor: dict[str, Row] = {}
    for row in rows:
        groups.setdefault((row.task, row.cell), []).append(row)
        if (row.donor, row.strategy) == (NOISE, NOISE_KINDS[0]):
            floor[row.question] = row
    return [_summary(cell, group, floor) for (_, cell), group in groups.items()]


def _summary(
    key: tuple[str, str, str, float], rows: Sequence[Row], floor: Mapping[str, Row]
) -> Summary:
    def mean(name: str) -> float:
        return float(statistics.mean(getattr(row, name) for row in rows))

    first = [row.first_difference for row in rows if row.first_difference is not None]
    pairs = [
        (row.f1, row.full_f1) for row in rows if row.f1 is not None and row.full_f1 is not None
    ]
    answered = [f1 for f1, full in pairs if full >= ANSWERED_F1]
    differences = [f1 - full for f1, full in pairs]
    return Summary(
        *key,
        count=len(rows),
        mean_kl=mean("kl"),
        median_kl=statistics.median(row.kl for row in rows),
        p90_kl=float(np.quantile([row.kl for row in rows], 0.9)),
        kl_by_token=_by_token(rows),
        top1=mean("top1"),
        same_text=1 - len(first) / len(rows),
        first_difference=statistics.median(first) if first else None,
        f1=mean("f1") if pairs else None,
        full_f1=mean("full_f1") if pairs else None,
        f1_difference=paired_bootstrap(differences) if pairs else None,
        f1_at_least=paired_bootstrap(differences, level=0.9)[0] if pairs else None,
        answered=len(answered),
        answered_f1=statistics.mean(answered) if answered else None,
        gap_f1=_gap_f1(rows),
        gap_kl=_gap_kl(rows),
        ttft_ratio=statistics.median(row.ttft_ratio for row in rows),
        charged_share=mean("charged_share"),
        charged_flops=mean("charged_flops"),
        hit_rate=mean("hit_rate"),
        bytes_per_token=mean("bytes_per_token"),
        ttft_ms=statistics.median(row.ttft_ms for row in rows),
        full_ttft_ms=statistics.median(row.ttft_ms / row.ttft_ratio for row in rows),
        recomputed_layer_tokens=mean("recomputed_layer_tokens"),
        dense_layer_tokens=mean("dense_layer_tokens"),
        kv_bytes=mean("kv_bytes"),
        long=summarize_long(rows, floor),
    )


def _by_token(rows: Sequence[Row]) -> tuple[float, ...]:
    longest = max(len(row.kl_by_token) for row in rows)
    return tuple(
        statistics.mean(row.kl_by_token[n] for row in rows if n < len(row.kl_by_token))
        for n in range(longest)
    )


def _gap_f1(rows: Sequence[Row]) -> float | None:
    known = [
        (row.f1, row.full_f1, row.no_context_f1)
        for row in rows
        if row.f1 is not None and row.full_f1 is not None and row.no_context_f1 is not None
    ]
    if len(known) < len(rows):
        return None
    f1, full, least = (statistics.mean(values) for values in zip(*known, strict=True))
    return (f1 - least) / (full - least) if full - least >= LEAST_GAP else None


def _gap_kl(rows: Sequence[Row]) -> float | None:
    without = [row.no_context_kl for row in rows if row.no_context_kl is not None]
    if len(without) < len(rows) or not sum(without):
        return None
    return 1 - sum(row.kl for row in rows) / sum(without)


def quality_tables(summaries: Sequence[Summary], margin: float) -> Iterator[Table]:
    """Three tables per donor kind and way of keeping. One way of keeping fits into 80 columns."""
    many = len({one.kept for one in summaries}) > 1
    headings = ("ratio", "paid", "KL", "median", "top-1", "same", "at", "F1/full", "95 %", "TTFT")
    for donor, kept in dict.fromkeys((one.donor, one.kept) for one in summaries):
        own = [one for one in summaries if (one.donor, one.kept) == (donor, kept)]
        yield table(
            f"{donor}: {DONORS.get(donor, donor)} ({max(one.count for one in own)} questions)"
            + (f"\n{kept}, {own[0].bytes_per_token:,.0f} B/token" if many else ""),
            ("strategy",),
            (*headings, *(["hits"] if many else [])),
            [_cells(one) + ([f"{one.hit_rate:.0%}"] if many else []) for one in own],
        )
        tokens = [
            f"{low + 1}–{high}" if high > low + 1 else f"{high}" for low, high in TOKEN_GROUPS
        ]
        yield table(
            "",
            ("strategy",),
            ("ratio", "FLOPs", "90 %", *tokens, "answered", "within"),
            [_more_cells(one, margin) for one in own],
        )
        yield table(
            "",
            ("strategy",),
            ("ratio", "gap F1", "gap KL", "layer-tokens", "of", "KV", "ms", "in full"),
            [[one.strategy, ratio_of(one), *_arena_cells(one)] for one in own],
        )


def ratio_of(one: Summary) -> str:
    return "–" if one.strategy in RATIO_FREE or not one.ratio else f"{one.ratio:.0%}"


def _known_f1(one: Summary) -> tuple[float, float, tuple[float, float]]:
    """F1 with reuse and with full prefill, and its difference."""
    assert one.f1 is not None and one.full_f1 is not None and one.f1_difference is not None
    return one.f1, one.full_f1, one.f1_difference


def _cells(one: Summary) -> list[str]:
    f1, full, (low, high) = _known_f1(one)
    return [
        *(one.strategy, ratio_of(one)),
        *(f"{one.charged_share:.1%}", f"{one.mean_kl:.4f}", f"{one.median_kl:.4f}"),
        *(f"{one.top1:.0%}", f"{one.same_text:.0%}"),
        "–" if one.first_difference is None else f"{one.first_difference:.0f}",
        *(f"{f1:.2f}/{full:.2f}", f"{low:+.2f}…{high:+.2f}", f"{one.ttft_ratio:.2f}"),
    ]


def _more_cells(one: Summary, margin: float) -> list[str]:
    groups = [one.kl_by_token[low:high] for low, high in TOKEN_GROUPS]
    return [
        *(one.strategy, ratio_of(one), f"{one.charged_flops:.1%}", f"{one.p90_kl:.3f}"),
        *(f"{statistics.mean(group):.3f}" if group else "–" for group in groups),
        "–" if one.answered_f1 is None else f"{one.answered_f1:.2f} ({one.answered})",
        "yes" if one.is_within(margin) else "no",
    ]


def _arena_cells(one: Summary) -> list[str]:
    """KVShareArena's measures."""
    gaps = [percent(one.gap_f1), percent(one.gap_kl)]
    if not one.dense_layer_tokens:
        return [*gaps, *["–"] * 5]
    return [
        *gaps,
        *(f"{one.recomputed_layer_tokens:,.0f}", f"{one.dense_layer_tokens:,.0f}"),
        *(format_bytes(round(one.kv_bytes)), ms(one.ttft_ms), ms(one.full_ttft_ms)),
    ]


def quality_figure(summaries: Sequence[Summary], title: str) -> Figure:
    """Mean KL against charged percent: a panel per donor kind, a curve per strategy and way of
    keeping."""
    many = len({one.kept for one in summaries}) > 1
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for one in summaries:
        name = f"{one.strategy}, {one.kept}" if many else one.strategy
        curve = panels.setdefault(one.donor, {}).setdefault(name, [])
        curve.append((100 * one.charged_share, one.mean_kl if one.mean_kl > ROUNDING else 0.0))
    return draw_lines(
        panels,
        title=title,
        x="charged share of moved tokens, %",
        y="mean KL against full prefill, nats",
    )
