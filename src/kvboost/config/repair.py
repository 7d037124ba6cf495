"""How moved text is repaired."""

from __future__ import annotations

from dataclasses import dataclass

from kvboost.config.validation import one_of, within

STRATEGIES = ("auto", "query", "cacheblend")
CONTROL = "random"
"""Any rows, the same number as another strategy."""
WITHOUT_RATIO = ("selective", "none")
"""The ends of every moved passage, or nothing; ``recompute_ratio`` says nothing to them."""
CONTROLS = (CONTROL, *WITHOUT_RATIO)
"""Strategies for ``kvboost quality`` and tests alone: what others are compared with."""
OVERLAP = 16
"""With ``selective``: how many rows at each end of a moved passage."""
DEFAULT_RATIO = 0.19
MOST_CONTEXTS = 4
"""Copies of the same text that are mixed, each read after other text."""
REUSE_MOVED = ("when_faster", "always")
LEAST_MOVED = 32
"""A shorter moved run is recomputed: repair would recompute much of it anyway."""


@dataclass(frozen=True)
class RepairParams:
    """How one request repairs the text that it reuses at another place."""

    strategy: str = "auto"
    ratio: float = DEFAULT_RATIO
    """The share of moved rows that is computed again; with ``auto`` on average."""
    reuse_moved: str = "when_faster"
    """Strategy ``auto`` computes moved text where reusing it would not be faster. ``"always"``
    reuses it anyway, so every machine gives the same answer."""

    def __post_init__(self) -> None:
        if self.strategy not in CONTROLS:
            one_of(self.strategy, STRATEGIES, "recompute_strategy")
        one_of(self.reuse_moved, REUSE_MOVED, "reuse_moved")
        within(self.ratio, 0.0, 1.0, "recompute_ratio")

    @property
    def name(self) -> str:
        """Requests whose repairs have the same name may continue from each other's rows."""
        return f"{self.strategy} {self.ratio}"
