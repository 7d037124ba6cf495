"""When to look for drafts, where looking takes time that steps do not wait for."""

from __future__ import annotations

LOOKS = ((4, 1), (8, 2), (16, 4))
"""How many looks in vain there may be before the pauses between them become longer, and the steps
from one look to the next until then."""
LONGEST = 8
USEFUL = 1.0
"""Tokens that a draft promises if it was worth the look."""


class Pauses:
    """A request's. On a GPU a step takes little more time than what the host does for it, so what
    repeats nothing is looked up less and less often."""

    def __init__(self) -> None:
        self._in_vain = self._left = self._accepted = 0

    def is_over(self, accepted: int) -> bool:
        """Whether to look before this step; ``accepted`` tokens of drafts are in the answer."""
        if accepted > self._accepted:
            self._accepted = accepted
            self._in_vain = self._left = 0
        self._left -= 1
        return self._left < 0

    def looked(self, promised: float) -> None:
        """Remembers what the look has found."""
        self._in_vain = 0 if promised >= USEFUL else self._in_vain + 1
        steps = next((each for most, each in LOOKS if self._in_vain <= most), LONGEST)
        self._left = steps - 1
