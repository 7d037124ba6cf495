"""Why each part of a prompt was or was not reused."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

from kvboost.config import LEAST_MOVED
from kvboost.results.spans import Span, SpanKind

RECOMPUTED = "recomputed"
MARKS = {
    SpanKind.EXACT.value: "█",
    SpanKind.APPROXIMATE.value: "▓",
    SpanKind.MOVED.value: "▓",
    RECOMPUTED: "▚",
    SpanKind.COMPUTE.value: "▒",
}
"""The characters of a map's cells without colours."""
MAP_CELLS = 64
_SHOWN_BEFORE = 24
_SIDE = 60
"""Characters of a line that are shown on each side of the place where two texts differ."""


class Why(str, Enum):
    """Why rows of a prompt were reused, or why they were computed."""

    PREFIX = "prefix"
    PAST = "past"
    MOVED = "moved"
    NEW = "new"
    SHORT = "short"
    LAST = "last"
    GONE = "gone"
    SLOWER = "slower"
    MODE = "mode"
    MODEL = "model"
    SALT = "salt"


MEANINGS = {
    Why.PREFIX: "the cache holds the same text after the same beginning",
    Why.PAST: "this conversation's own past, which was computed on top of moved text",
    Why.MOVED: "the cache holds the same text at another position",
    Why.NEW: "new text",
    Why.SHORT: f"cached, but pieces of fewer than {LEAST_MOVED} tokens are not moved",
    Why.LAST: "the last rows of a prompt are always computed",
    Why.GONE: "was cached",
    Why.SLOWER: "cached at another position, but moving it would not have been faster",
    Why.MODE: "the request's mode does not reuse it",
    Why.MODEL: "this model cannot reuse it",
    Why.SALT: "cached only under another cache_salt or adapter",
}


@dataclass(frozen=True)
class Part:
    """Rows ``[start, end)`` of a prompt that have one source for one reason."""

    start: int
    end: int
    kind: SpanKind
    why: Why
    detail: str
    """The reason as a sentence, with its numbers."""
    text: str
    """The part's text; of a long one the beginning and the end."""
    recomputed: int = 0
    """Of a moved part: how many of its rows were computed again."""
    tiers: tuple[str, ...] = ()
    distance: int | None = None
    """Of a moved part: how many positions further on it is now."""
    rows_changed: float | None = None
    """Of a moved part: how many of the rows before it are not the same here and there."""
    before_then: str | None = None
    """Of a moved part: the text before it where it was cached, if the cache still knows that."""
    before_now: str | None = None
    document: str | None = None
    """The name of the document that holds the text. Servers know names."""

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Divergence:
    """Where a prompt leaves the cached text that it shares most with."""

    row: int
    """The first token that differs."""
    line: int
    """The line of the prompt in which it is, from 1."""
    before: str
    """The text of that line before it, which both sides share."""
    prompt: str
    cached: str | None
    """The rest of the line in the prompt, and in the cached text. None: that is not shown."""
    replaced: tuple[int, int] | None = None
    """The numbers of cached tokens that the edit replaced, and of those in their place, if both
    texts are the same after it."""


@dataclass(frozen=True)
class Explanation:
    """Why each part of a prompt was or was not reused. ``str()`` shows it as text. The parts cover
    the prompt from the first to the last token."""

    parts: tuple[Part, ...]
    divergence: Divergence | None
    """None if the prompt goes on where cached text ends, or if no cached text begins like it."""
    notes: tuple[str, ...]
    map: tuple[str, ...] = ()
    """The prompt in cells of equal length: what most tokens of each are."""

    @property
    def prompt_tokens(self) -> int:
        return self.parts[-1].end if self.parts else 0

    def without_cached_text(self) -> Explanation:
        """This explanation without text that may be another user's; only the prompt's own text is
        left."""
        found = self.divergence
        return replace(
            self,
            parts=tuple(replace(one, before_then=None) for one in self.parts),
            divergence=None if found is None else replace(found, cached=None),
        )

    @property
    def computed_tokens(self) -> int:
        """Rows that were computed, those of moved text included."""
        computed = sum(one.num_tokens for one in self.parts if one.kind is SpanKind.COMPUTE)
        return computed + sum(one.recomputed for one in self.parts)

    def as_dict(self) -> dict[str, Any]:
        """The explanation as JSON holds it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "computed_tokens": self.computed_tokens,
            "divergence": None if self.divergence is None else asdict(self.divergence),
            "parts": [
                {**asdict(one), "kind": one.kind.value, "why": one.why.value, "tiers": [*one.tiers]}
                for one in self.parts
            ],
            "notes": [*self.notes],
            "map": [*self.map],
        }

    @classmethod
    def from_dict(cls, given: dict[str, Any]) -> Explanation:
        """The explanation that :meth:`as_dict` gave, from JSON."""
        parts = []
        for one in given["parts"]:
            typed = {"kind": SpanKind(one["kind"]), "why": Why(one["why"])}
            parts.append(Part(**{**one, **typed, "tiers": tuple(one["tiers"])}))
        found = given["divergence"]
        if found is not None:
            replaced = None if found["replaced"] is None else tuple(found["replaced"])
            found = Divergence(**{**found, "replaced": replaced})
        return cls(tuple(parts), found, tuple(given["notes"]), tuple(given["map"]))

    def __str__(self) -> str:
        bar = "".join(MARKS[cell] for cell in self.map)
        kinds = "  ".join(f"{MARKS[kind]} {kind}" for kind in MARKS if kind in self.map)
        return "\n".join([self.title, bar, *self.pointer, kinds, *self.details])

    @property
    def title(self) -> str:
        total = self.prompt_tokens
        reused = (total - self.computed_tokens) / total if total else 0.0
        return f"{total:,} tokens, {reused:.0%} reused, {self.computed_tokens:,} computed"

    @property
    def pointer(self) -> list[str]:
        """A line below the map that points at the divergence, if there is one."""
        found = self.divergence
        if found is None or not self.map:
            return []
        cell = found.row * len(self.map) // self.prompt_tokens
        return [f"{' ' * cell}↑ line {found.line:,}"]

    @property
    def details(self) -> list[str]:
        """The text that ``str()`` shows after the map: the place where the prompt leaves cached
        text, with the text on both sides, and each part with its reason."""
        notes = [f"note: {note}" for note in self.notes]
        return [*_shown(self.divergence), "", *_table(self.parts), *notes]


def _tokens(number: int) -> str:
    return "token" if number == 1 else "tokens"


def cells(
    spans: Sequence[Span], recomputed: Sequence[int], width: int = MAP_CELLS
) -> tuple[str, ...]:
    """A prompt in ``width`` cells: the kind of most tokens of each. A moved cell of which a fifth
    or more was computed again is ``"recomputed"``."""
    total, found = spans[-1].end if spans else 0, []
    for cell in range(width if total else 0):
        start, end = cell * total / width, (cell + 1) * total / width
        shares = {
            kind: sum(
                max(0.0, min(span.end, end) - max(span.start, start))
                for span in spans
                if span.kind is kind
            )
            for kind in SpanKind
        }
        kind = max(SpanKind, key=lambda kind: shares[kind])
        again = bisect_left(recomputed, end) - bisect_left(recomputed, start)
        is_again = kind is SpanKind.MOVED and again >= 0.2 * shares[kind]
        found.append(RECOMPUTED if is_again else kind.value)
    return tuple(found)


def duration(seconds: float) -> str:
    """A time in words."""
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _shown(found: Divergence | None) -> list[str]:
    if found is None:
        return []
    edit = ""
    if found.replaced is not None:
        old, new = found.replaced
        edit = f": {new:,} {_tokens(new)} in place of {old:,}"
    before = _end(found.before, _SIDE)
    cached = [] if found.cached is None else [_beginning(found.cached, _SIDE)]
    return [
        "",
        f"differs from the nearest cached text at token {found.row:,}, line {found.line:,}" + edit,
        *(f"  cached: {before}{side}" for side in cached),
        f"  prompt: {before}{_beginning(found.prompt, _SIDE)}",
        f"          {' ' * len(before)}^",
    ]


def _table(parts: Sequence[Part]) -> list[str]:
    """Some lines for each part: its reason, its text, and what was before moved text."""
    rows = [("tokens", "count", "source", "why, and the text")]
    for part in parts:
        tokens = f"{part.start:,} to {part.end - 1:,}"
        rows.append((tokens, f"{part.num_tokens:,}", part.kind.value, part.detail))
    widths = [max(len(row[place]) for row in rows) for place in range(3)]
    lines = [
        f"{span:<{widths[0]}}  {count:>{widths[1]}}  {kind:<{widths[2]}}  {said}"
        for span, count, kind, said in rows
    ]
    before = " " * (sum(widths) + 6)
    for number, part in reversed([*enumerate(parts, start=2)]):
        named = "" if part.document is None else f" ({part.document})"
        under = [f"{before}{_quoted(part.text)}{named}"]
        if part.before_then is not None and part.before_now is not None:
            then, now = (_end(text, _SHOWN_BEFORE) for text in (part.before_then, part.before_now))
            if then != now:
                under.append(f"{before}was after “{then}”, is after “{now}”")
        lines[number:number] = under
    return lines


def _quoted(text: str) -> str:
    shown = _one_line(" ".join(text.split()))
    return f"“{shown}”" if len(shown) <= _SIDE else f"“{shown[:36]} … {shown[-21:]}”"


def _beginning(text: str, most: int) -> str:
    shown = _one_line(text)
    return shown if len(shown) <= most else f"{shown[:most]}…"


def _end(text: str, most: int) -> str:
    shown = _one_line(text)
    return shown if len(shown) <= most else f"…{shown[-most:]}"


def _one_line(text: str) -> str:
    """``text`` in one line of a terminal: other controls could change what it shows."""
    shown = text.replace("\n", "⏎").replace("\t", " ")
    return "".join(one if one.isprintable() else "·" for one in shown)
