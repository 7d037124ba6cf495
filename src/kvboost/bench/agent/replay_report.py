"""Replayed sessions: sums by kind, tables, the picture, and whether what was compared has run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType

from kvboost.bench.agent.checks import ANSWER_TOKENS, Check
from kvboost.bench.agent.traced import Traced
from kvboost.bench.kit.figures import Bars, Figure, draw_bars
from kvboost.bench.kit.tables import dim, ms, percent, table, warning
from kvboost.bench.peers.servers import BASELINE, CONNECTOR, OURS, PREFIX
from kvboost.bench.serve.clients import SOURCES, Answer
from kvboost.bench.serve.report import problems

ALL = "all"
NOTE = dim(
    "prefix: found by an ideal prefix cache, which keeps all prompts of a session; ideal: the "
    "tokens it computes.\nelsewhere: those of them that the session had sent or received before at "
    "another place, 64 or more in a row.\ncomputed: by the server, recomputed ones included; of "
    "others than ours, prompt tokens less cached ones.\nRows of ours: exact; approximate, which "
    "follow moved ones in a text that was read before; moved, as stored;\nmoved and recomputed; "
    "computed.\nfirst tokens: ms by the client's clock, summed; ours ÷: kvboost's sum by this one."
)

CHECKS_NOTE = dim(
    "Of the turns with moved rows, against mode baseline. same action: the first tool call, fenced "
    f"block or\nJSON object of {ANSWER_TOKENS} greedy tokens, as far as both answers go; of the "
    "turns in which an answer has one."
)


@dataclass(frozen=True)
class Row:
    """One system's answers to the requests of one kind, summed."""

    system: str
    kind: str
    requests: int
    prompt_tokens: int
    """As the server counts them."""
    computed_tokens: int | None
    """None if the server does not tell."""
    ideal_tokens: int
    rows: dict[str, int]
    """Ours only: by source, and ``moved`` without ``recomputed``."""
    ttft_ms: float

    @property
    def computed_by_ideal(self) -> float | None:
        if self.computed_tokens is None:
            return None
        return self.computed_tokens / self.ideal_tokens

    @property
    def shares(self) -> dict[str, float]:
        return {name: rows / self.prompt_tokens for name, rows in self.rows.items()}


@dataclass(frozen=True)
class Replayed:
    """A run."""

    sessions: Sequence[Traced]
    answers: Mapping[str, Mapping[int, Answer]]
    """By system and by the line of the request."""
    checks: Sequence[Check]
    inside_vllm: Mapping[str, float]
    """The rows that KVBoost has put into vLLM's pages, by source, also for answers."""
    computed_inside: int | None = None
    """Those that it has computed there for prompts; None if that is not known."""
    checks_asked: int = 0

    @property
    def kinds(self) -> list[str]:
        """The kinds of the sessions, and ``ALL`` if there are several."""
        found = list(dict.fromkeys(one.kind for one in self.sessions))
        return [*found, ALL] if len(found) > 1 else found

    def of_kind(self, kind: str) -> list[Traced]:
        return [one for one in self.sessions if kind in (one.kind, ALL)]

    def asked(self, kind: str) -> dict[str, int]:
        """The requests of a kind, summed: counts of the bench's own."""
        sessions = self.of_kind(kind)
        prompts = [prompt for one in sessions for prompt in one.prompts]
        return {
            "sessions": len(sessions),
            "requests": len(prompts),
            "prompt_tokens": sum(one.tokens for one in prompts),
            "prefix_tokens": sum(one.prefix_tokens for one in prompts),
            "ideal_tokens": sum(one.ideal_tokens for one in prompts),
            "elsewhere_tokens": sum(one.elsewhere_tokens for one in prompts),
            "too_long": sum(one.too_long for one in sessions),
            "empty": sum(one.empty for one in sessions),
        }

    def rows(self, kind: str) -> list[Row]:
        """One per system."""
        lines = [prompt.line for one in self.of_kind(kind) for prompt in one.prompts]
        ideal = self.asked(kind)["ideal_tokens"]
        return [
            self._row(name, kind, [own[at] for at in lines], ideal)
            for name, own in self.answers.items()
        ]

    def _row(self, system: str, kind: str, answers: Sequence[Answer], ideal: int) -> Row:
        total = sum(one.prompt_tokens for one in answers)
        computed: int | None = total - sum(one.cached_tokens for one in answers)
        rows: dict[str, int] = {}
        if any(one.rows for one in answers):
            rows = {name: sum(one.rows[name] for one in answers) for name in SOURCES}
            rows["moved"] -= rows["recomputed"]
            computed = rows["computed"] + rows["recomputed"]
        elif system == CONNECTOR:
            # vLLM calls cached what KVBoost has computed; its counters do not know kinds.
            whole, own = kind == ALL or len(self.kinds) == 1, self.computed_inside
            computed = (computed or 0) + own if whole and own is not None else None
        first = 1e3 * sum(one.ttft_s or 0.0 for one in answers)
        return Row(system, kind, len(answers), total, computed, ideal, rows, first)

    def as_json(self) -> dict[str, Any]:
        return {
            "kinds": {kind: self.asked(kind) for kind in self.kinds},
            "rows": [
                {
                    **asdict(row),
                    "computed_by_ideal": row.computed_by_ideal,
                    "shares": row.shares,
                    "ours_by_this": against(row, self.rows(kind)),
                }
                for kind in self.kinds
                for row in self.rows(kind)
            ],
            "inside_vllm": dict(self.inside_vllm),
            "checks": [asdict(one) for one in self.checks],
            "requests": [
                {
                    "kind": session.kind,
                    "session": session.name,
                    "line": prompt.line,
                    "tokens": prompt.tokens,
                    "prefix_tokens": prompt.prefix_tokens,
                    "elsewhere_tokens": prompt.elsewhere_tokens,
                    "answers": {
                        name: _told(own[prompt.line]) for name, own in self.answers.items()
                    },
                }
                for session in self.sessions
                for prompt in session.prompts
            ],
        }


def against(row: Row, rows: Sequence[Row]) -> float | None:
    """Our first tokens by those of ``row``; None of our own."""
    ours = next((one for one in rows if one.system == OURS), None)
    if ours is None or row.system == OURS or not row.ttft_ms:
        return None
    return ours.ttft_ms / row.ttft_ms


def show(
    found: Replayed,
    failures: Mapping[str, str],
    planned: Sequence[Traced],
    unsent: Sequence[Traced],
    most: int,
) -> Iterator[RenderableType]:
    """Tables and sentences. ``unsent``: sessions without a request of at most ``most`` tokens."""
    if found.sessions:
        yield table(
            "what was sent, by kind of session",
            ("kind",),
            ("sessions", "requests", "tokens", "prefix", "ideal", "elsewhere"),
            (_sent(kind, found.asked(kind)) for kind in found.kinds),
        )
    for kind in found.kinds if found.answers else ():
        rows = found.rows(kind)
        yield table(
            f"{kind}: computed tokens and first tokens",
            ("system",),
            ("computed", "÷ ideal", "first tokens", "ours ÷"),
            (_cells(row, against(row, rows)) for row in rows),
        )
        ours = [row for row in rows if row.rows]
        if ours:
            cells = ([row.system, *(f"{row.shares[one]:.1%}" for one in SOURCES)] for row in ours)
            yield table(f"{kind}: rows of prompts by source", ("system",), SOURCES, cells)
    if found.checks:
        yield _checks_table(found)
        yield CHECKS_NOTE
    yield NOTE
    yield from map(warning, _left_out(found, planned, unsent, most))
    yield from problems({}, failures)


def _left_out(
    found: Replayed, planned: Sequence[Traced], unsent: Sequence[Traced], most: int
) -> Iterator[str]:
    if late := len(planned) - len(found.sessions):
        yield f"{late} of {len(planned)} sessions were left out: no time (--minutes)"
    every = [*found.sessions, *unsent]
    if long := sum(one.too_long for one in every):
        whole = f", all of {len(unsent)} sessions among them" if unsent else ""
        yield f"{long} requests were left out: they have more than {most:,} tokens{whole}"
    if empty := sum(one.empty for one in every):
        yield f"{empty} requests were left out: the trace has no prompt for them"
    if len(found.checks) < found.checks_asked:
        few = f"{len(found.checks)} of {found.checks_asked} turns were checked"
        yield f"{few}: no others can reuse moved text, or there was no time for their sessions"


def path_problems(found: Replayed) -> list[str]:
    """Where a system did not do what it is compared for."""
    return [*_reuse_problems(found), *_check_problems(found.checks)]


def _reuse_problems(found: Replayed) -> Iterator[str]:
    if not found.sessions:
        return
    asked = found.asked(ALL)
    for row in found.rows(ALL):
        moved = row.rows.get("moved", 0) + row.rows.get("approximate", 0)
        if row.system == OURS and asked["elsewhere_tokens"] and not moved:
            yield (
                f"{OURS} moved nothing, though {asked['elsewhere_tokens']:,} tokens were known "
                "elsewhere: moved reuse was not measured; replay sessions with longer prompts"
            )
        if row.system == PREFIX and moved:
            yield f"{PREFIX} moved {moved:,} rows: it was not prefix reuse alone"
        if row.system == BASELINE and row.computed_tokens != row.prompt_tokens:
            reused = row.prompt_tokens - (row.computed_tokens or 0)
            yield f"{BASELINE} reused {reused:,} of {row.prompt_tokens:,} tokens"
        if row.system == CONNECTOR and not found.inside_vllm.get("moved"):
            yield f"{CONNECTOR} moved nothing: KVBoost's part in it was not measured"
        if row.prompt_tokens != asked["prompt_tokens"]:
            yield (
                f"{row.system} counts {row.prompt_tokens:,} prompt tokens, the bench "
                f"{asked['prompt_tokens']:,}: computed ÷ ideal does not hold"
            )


def _check_problems(checks: Sequence[Check]) -> Iterator[str]:
    if checks and not any(one.moved_tokens for one in checks):
        yield "no checked turn reused moved text: the check compared nothing"
    for one in checks:
        if one.full_reused_tokens:
            yield f"line {one.line}: the full prefill reused {one.full_reused_tokens:,} rows"


def replay_figure(found: Replayed, title: str) -> Figure:
    """Two panels by kind: shares of our prompts' rows by source, stacked, of the first of our
    systems; and what each system computed by what an ideal prefix cache computes."""
    every = [(kind, row) for kind in found.kinds for row in found.rows(kind)]
    first = next((row.system for _, row in every if row.rows), OURS)
    stacks: Bars = {
        source: {
            kind: row.shares[source] for kind, row in every if row.system == first and row.rows
        }
        for source in SOURCES
    }
    shown = f"{first}: rows of prompts by source"
    ratios: dict[str, dict[str, float]] = {}
    for kind, row in every:
        if row.computed_by_ideal is not None:
            ratios.setdefault(row.system, {})[kind] = row.computed_by_ideal
    return draw_bars(
        {shown: stacks, "tokens computed": ratios},
        title=title,
        y=("share", "÷ an ideal prefix cache's"),
        stacked=(shown,),
    )


def _sent(kind: str, asked: Mapping[str, int]) -> list[str]:
    total = asked["prompt_tokens"]
    return [
        kind,
        *(f"{asked[name]:,}" for name in ("sessions", "requests", "prompt_tokens")),
        f"{asked['prefix_tokens'] / total:.1%}",
        f"{asked['ideal_tokens']:,}",
        percent(asked["elsewhere_tokens"] / asked["ideal_tokens"]),
    ]


def _cells(row: Row, ours_by_this: float | None) -> list[str]:
    ratio = row.computed_by_ideal
    return [
        row.system,
        "–" if row.computed_tokens is None else f"{row.computed_tokens:,}",
        "–" if ratio is None else f"{ratio:.2f}",
        ms(row.ttft_ms),
        "–" if ours_by_this is None else f"{ours_by_this:.2f}",
    ]


def _checks_table(found: Replayed) -> RenderableType:
    def cells(kind: str) -> list[str]:
        own = [one for one in found.checks if kind in (one.kind, ALL)]
        moved = [one for one in own if one.moved_tokens]
        if not moved:
            return [kind, f"{len(own)}", "0", *("–",) * 4]
        kls = [one.kl for one in moved]
        actions = [one.same_action for one in moved if one.same_action is not None]
        return [
            *(kind, f"{len(own)}", f"{len(moved)}"),
            *(f"{sum(kls) / len(kls):.4f}", f"{max(kls):.4f}"),
            f"{sum(actions)} of {len(actions)}",
            f"{sum(one.same_text for one in moved)}",
        ]

    checked = {one.kind for one in found.checks}
    return table(
        "moved reuse against a full prefill, checked turns",
        ("kind",),
        ("turns", "moved", "mean KL", "highest", "same action", "same text"),
        (cells(kind) for kind in found.kinds if kind == ALL or kind in checked),
    )


def _told(answer: Answer) -> dict[str, Any]:
    return {
        "ttft_ms": 1e3 * (answer.ttft_s or 0.0),
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "rows": answer.rows,
    }
