"""Where the rows of a prompt come from."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property


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


@dataclass(frozen=True)
class ReuseReport:
    """How a prompt is served. The spans cover it from the first to the last token, without gaps."""

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
    expected_kl: float | None = None
    """How far the first token's distribution is expected to be from that of a full prefill (KL),
    with strategy ``auto``; None if there is nothing to tell it from."""

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
