"""How likely drafted tokens are accepted, learned from those that were."""

from __future__ import annotations

import threading
from collections.abc import Hashable

FADING = 0.98
"""What an older token counts, each time another one is seen."""


class Chances:
    """The share of drafted tokens that were accepted, by kind of draft. Thread-safe. A kind that
    has hardly been seen has the share that ``parent`` knows, or the one that is expected."""

    def __init__(self, weight: float, parent: Chances | None = None) -> None:
        """``weight``: how many tokens the expected share counts for."""
        self._weight = weight
        self._parent = parent
        self._seen: dict[Hashable, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def of(self, kind: Hashable, expected: float) -> float:
        """The chance of the next token of a draft, if all before it were accepted."""
        if self._parent is not None:
            expected = self._parent.of(kind, expected)
        with self._lock:
            accepted, tried = self._seen.get(kind, (0.0, 0.0))
        return (accepted + expected * self._weight) / (tried + self._weight)

    def observe(self, kind: Hashable, accepted: bool) -> None:
        """Learns what became of one token."""
        if self._parent is not None:
            self._parent.observe(kind, accepted)
        with self._lock:
            hits, tried = self._seen.get(kind, (0.0, 0.0))
            self._seen[kind] = hits * FADING + accepted, tried * FADING + 1
