"""Parts of a prompt, by where their rows come from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class SpanKind(str, Enum):
    EXACT = "exact"
    """The same tokens after the same prefix: the KV is what the model would compute."""
    APPROXIMATE = "approximate"
    """The same tokens after the same prefix, but computed on top of moved rows: the past of this
    conversation, reused as it is."""
    MOVED = "moved"
    """The same tokens at another position or after other text. Their keys are rotated to the new
    positions, and some rows are recomputed."""
    COMPUTE = "compute"
    """Not in the cache: computed for this request."""


@dataclass(frozen=True)
class Span:
    """Rows ``[start, end)`` of the prompt and where they come from."""

    kind: SpanKind
    start: int
    end: int
    donor: str | None = None
    """The key of the chunk that serves these rows."""
    offset: int = 0
    """The donor's row that serves the first row of the span."""
    resemblance: float = 0.0
    """Of a moved span: how much the text before it resembles the text before its donor, 0 to 1."""
    tier: str | None = None
    """The tier that held the donor: ``"gpu"``, ``"ram"``, ``"disk"`` or ``"remote"``. ``"shared"``:
    the rows are in place, in memory of another request that runs or, on a GPU, has ended."""

    @property
    def num_tokens(self) -> int:
        return self.end - self.start
