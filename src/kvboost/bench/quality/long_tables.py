"""Tables and a picture of long answers, by the way passages were read before."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import RenderableType

from kvboost.bench.kit.figures import Figure, Value, draw_lines
from kvboost.bench.kit.tables import dim, percent, table, warning
from kvboost.bench.quality.long_summary import Both, LongSummary
from kvboost.bench.quality.rows import DONORS, NOISE
from kvboost.bench.quality.summary import Summary, ratio_of

FEW = 30
"""So few examples show the size of things, no more."""
COLUMNS = dim(
    """19%      after a strategy: share of moved rows that was recomputed at first
paid     what repair cost per moved row, probes included
KL       deviation from full prefill over its answer: mean over examples
top-1    tokens of full prefill's answer that stay the likeliest
same     examples with the very same greedy answer
at       tokens before the first difference, on average; the same answer: all
like     likeness of the greedy answer to full prefill's, and 95 % interval:
         ROUGE-L of summaries, of code one less the share of characters to edit
÷ floor  as a share of the floor's: bfloat16 against float32, full prefills
diff     95 % interval of the paired difference to the floor's likeness
KL of token n: mean and 95 % interval by place in the answer
TTFT     time until the logits were there, as a share of full prefill's
90 %     90th percentile of KL over examples
gap      share of the way from no passages to full prefill that is kept, in KL
none     likeness of an answer without passages
KL ÷, at ÷  KL and at as multiples of the floor's
parses   answers that are a function, with reuse/with full prefill
right    functions that pass their doctest, or the edit that was asked for (its
         docstring may differ); of: so many answers of which this can be told
         diff: 95 % intervals of the paired differences"""
)


def long_tables(summaries: Sequence[Summary]) -> Iterator[RenderableType]:
    """Tables per task, donor kind and way of keeping, 80 columns wide. The floor is the last line
    of each."""
    known = [(one, one.long) for one in summaries if one.long is not None]
    many = len({one.kept for one in summaries}) > 1
    floors = {long.task: (one, long) for one, long in known if one.donor == NOISE}
    yield COLUMNS
    for task, donor, kept in dict.fromkeys((long.task, one.donor, one.kept) for one, long in known):
        if donor == NOISE:
            continue
        own = [
            (one, long)
            for one, long in known
            if (long.task, one.donor, one.kept) == (task, donor, kept)
        ]
        count = max(one.count for one, _ in own)
        title = f"{task}, {donor}: {DONORS.get(donor, donor)} ({count} examples)"
        own += [floors[task]] if task in floors else []
        yield table(
            f"{title}\n{kept}" if many else title,
            ("strategy",),
            ("paid", "KL", "top-1", "same", "at", "like", "95 %", "÷ floor", "diff"),
            [_likeness(one, long) for one, long in own],
        )
        groups = [(low, high) for low, high, _ in own[0][1].kl_by_tokens]
        yield table(
            "",
            ("KL of token",),
            [f"{low}" if low == high else f"{low}–{high}" for low, high in groups],
            [_kl_cells(one, long) for one, long in own],
        )
        yield table(
            "",
            ("strategy",),
            ("TTFT", "90 %", "gap", "none", "KL ÷", "at ÷"),
            [_other(one, long) for one, long in own],
        )
        if any(long.parses for _, long in own):
            yield table(
                "",
                ("strategy",),
                ("parses", "diff", "right", "of", "diff"),
                [_code(one, long) for one, long in own],
            )
    yield from map(warning, _warnings(known))


def _warnings(known: Sequence[tuple[Summary, LongSummary]]) -> Iterator[str]:
    counts = [one.count for one, _ in known if one.donor != NOISE]
    if not counts:
        return
    if min(counts) < FEW:
        yield f"few examples: {min(counts)}. Intervals from fewer than {FEW} are too narrow."
    beside = [long.floor.count for one, long in known if long.floor and one.donor != NOISE]
    if not beside:
        yield (
            "no floor was measured: --noise with --dtype float32 adds full prefills in bfloat16. "
            "Where these are slow, add them for some examples: --limit 2 --noise --save FILE."
        )
    elif min(beside) < max(counts):
        yield (
            f"the floor was measured on {min(beside)} of {max(counts)} examples: what is compared "
            "with it is compared on these."
        )


def _name(one: Summary) -> str:
    ratio = ratio_of(one)
    return one.strategy if ratio == "–" else f"{one.strategy} {ratio}"


def _likeness(one: Summary, long: LongSummary) -> list[str]:
    like, floor = long.likeness, long.floor
    return [
        *(_name(one), f"{one.charged_share:.1%}", f"{one.mean_kl:.4f}"),
        *(f"{one.top1:.0%}", f"{one.same_text:.0%}", f"{long.agreed_tokens:.0f}"),
        *(f"{like.mean:.2f}", f"{like.low:.2f}…{like.high:.2f}"),
        *(
            ("–", "–")
            if floor is None or one.donor == NOISE
            else (
                f"{floor.likeness_share:.0%}",
                f"{floor.likeness_difference.low:+.2f}…{floor.likeness_difference.high:+.2f}",
            )
        ),
    ]


def _kl_cells(one: Summary, long: LongSummary) -> list[str]:
    def short(number: float) -> str:
        return f"{number:.3f}".lstrip("0")

    return [
        _name(one),
        *(f"{short(kl.mean)} {short(kl.low)}…{short(kl.high)}" for _, _, kl in long.kl_by_tokens),
    ]


def _other(one: Summary, long: LongSummary) -> list[str]:
    floor = None if one.donor == NOISE else long.floor
    return [
        *(_name(one), f"{one.ttft_ratio:.2f}", f"{one.p90_kl:.3f}", percent(one.gap_kl)),
        f"{long.no_passages_likeness:.2f}",
        *(("–", "–") if floor is None else (f"{floor.kl_ratio:.0f}", f"{floor.agreed_share:.2f}")),
    ]


def _code(one: Summary, long: LongSummary) -> list[str]:
    count = long.passes.difference.count if long.passes else 0
    (parses, changed), (right, righted) = _both(long.parses), _both(long.passes)
    return [_name(one), parses, changed, right, f"{count}", righted]


def _both(both: Both | None) -> tuple[str, str]:
    if both is None:
        return "–", "–"
    change = both.difference
    return f"{both.reused:.0%}/{both.full:.0%}", f"{change.low:+.2f}…{change.high:+.2f}"


def long_figure(summaries: Sequence[Summary], title: str) -> Figure:
    """Mean KL by token of the answer, with its interval: a panel per task and donor kind, a curve
    per strategy, and the floor in each."""
    panels: dict[str, dict[str, list[tuple[float, Value]]]] = {}
    known = [(one, one.long) for one in summaries if one.long is not None]
    for one, long in known:
        line = [
            (math.sqrt(low * high), Value(kl.mean, kl.low, kl.high))
            for low, high, kl in long.kl_by_tokens
        ]
        donors = [other.donor for other, own in known if own.task == long.task]
        for donor in dict.fromkeys(donors) if one.donor == NOISE else (one.donor,):
            if donor != NOISE:
                panels.setdefault(f"{long.task}, {donor}", {})[_name(one)] = line
    return draw_lines(
        panels, title=title, x="token of the answer", y="KL against full prefill, nats", log_x=True
    )
