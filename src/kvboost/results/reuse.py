"""Where the rows of a prompt come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kvboost.errors import KVBoostError
from kvboost.results.explanation import Explanation
from kvboost.results.spans import Span, SpanKind


@dataclass(frozen=True)
class MovedRows:
    """Rows ``[start, end)`` of a prompt that were cached together at another position."""

    start: int
    end: int
    distance: int
    """The number of positions by which they are further on now."""
    rows_before: int
    """The number of rows before them, here or there, whichever is larger."""
    rows_changed: float
    """The number of these that are not the same here and there."""


@dataclass(frozen=True)
class PlanFacts:
    """The facts of a plan that an explanation needs besides its spans."""

    at: float
    """When the prompt was planned, in seconds since 1970."""
    root: str
    """The root of the prefix tree that was searched."""
    mode: str
    prefix: int = 0
    """The first rows that were found cached at their own positions, used or not."""
    follows: tuple[int, ...] = ()
    """The next tokens of the cached text that begins with these rows."""
    last: int = 0
    """Rows from here on are computed for the answer."""
    cacheable: int = 0
    """Rows from here on could not be cached."""
    movable: int = 0
    """Rows from here on are not moved. 0: moved text was not searched for."""
    moved: tuple[MovedRows, ...] = ()
    left: tuple[tuple[int, int], ...] = ()
    """Rows ``[start, end)`` that were found cached at other positions, and are not moved."""
    refusal: str = ""
    """Why moved text is not used at all: ``"mode"``, ``"model"`` or ``"slower"``."""
    costs: tuple[float, float] | None = None
    """If it was slower: what moving and what computing was expected to cost, in milliseconds, or in
    rows until forwards have been measured."""
    costs_are_ms: bool = False


@dataclass(frozen=True)
class ReuseReport:
    """The report on reuse for a prompt. Its spans cover the prompt without gaps."""

    spans: tuple[Span, ...]
    notes: tuple[str, ...] = ()
    strategy: str | None = None
    """The strategy that repaired the moved rows; None if there were none."""
    recomputed: tuple[int, ...] = ()
    """The moved rows that were recomputed, in order."""
    charged_tokens: float = 0.0
    """The cost of repair, in rows through all layers: the recomputed rows, plus the layers that
    probes ran and the last rows of the prompt that ran again."""
    charged_flops: float = 0.0
    """The same in arithmetic, attention included, as a share of computing all moved rows."""
    facts: PlanFacts | None = field(default=None, repr=False, compare=False)
    explainer: Callable[..., Any] | None = field(default=None, repr=False, compare=False)

    def explain(self, *, other_salts: bool = True) -> Explanation:
        """Why each part of the prompt was or was not reused. ``other_salts`` also looks for the
        text under other salts: leave it out where salts separate users who read explanations."""
        if self.explainer is None:
            raise KVBoostError(
                "there is nothing to explain here: the prompt was not planned, or its result was "
                "pickled or copied; call explain() on the result that the engine gave"
            )
        explanation: Explanation = self.explainer(self, other_salts)
        return explanation

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "explainer": None}

    @property
    def prompt_tokens(self) -> int:
        return self.spans[-1].end if self.spans else 0

    def count(self, kind: SpanKind) -> int:
        return self._counts[kind]

    @cached_property
    def _counts(self) -> dict[SpanKind, int]:
        """Rows by source: a server asks for them several times per answer."""
        counts = dict.fromkeys(SpanKind, 0)
        for span in self.spans:
            counts[span.kind] += span.end - span.start
        return counts

    @property
    def cached_tokens(self) -> int:
        """Rows that were not computed."""
        return self.prompt_tokens - self.count(SpanKind.COMPUTE) - len(self.recomputed)

    @property
    def charged_share(self) -> float:
        """``charged_tokens`` per moved row."""
        moved = self.count(SpanKind.MOVED)
        return self.charged_tokens / moved if moved else 0.0

    @property
    def kv_reuse_ratio(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.spans else 0.0
