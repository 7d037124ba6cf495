"""What a request gives back: text, tokens, true times, and where every prompt row came from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

PHASES = (
    "tokenize",
    "queue",
    "plan",
    "fetch",
    "assemble",
    "probe",
    "repair",
    "prefill",
    "decode",
    "admit",
)


class Clock:
    """Splits one request's time into phases that add up to the total.

    Starts when it is made, which is at call entry. ``lap`` charges everything since the last
    lap to a phase, so no moment is counted twice and none is lost.
    """

    def __init__(self) -> None:
        self._start = self._last = time.perf_counter()
        self._first_token: float | None = None
        self._seconds = dict.fromkeys(PHASES, 0.0)

    def lap(self, phase: str) -> float:
        """Charges the time since the last lap to ``phase``; returns it, in seconds."""
        now = time.perf_counter()
        seconds = now - self._last
        self._seconds[phase] += seconds
        self._last = now
        return seconds

    def leave_out(self, seconds: float) -> None:
        """Takes time out that was not ours: the caller's, between two pieces of a stream."""
        self._start += seconds
        self._last += seconds
        if self._first_token is not None:
            self._first_token += seconds

    def first_token(self) -> None:
        """To be called when the first token is on the host."""
        if self._first_token is None:
            self._first_token = time.perf_counter()

    def timings(self) -> Timings:
        first = self._last if self._first_token is None else self._first_token
        return Timings(
            ttft_ms=(first - self._start) * 1e3,
            total_ms=(self._last - self._start) * 1e3,
            **{f"{phase}_ms": seconds * 1e3 for phase, seconds in self._seconds.items()},
        )


@dataclass(frozen=True)
class Timings:
    """Milliseconds. The phases add up to ``total_ms``; ``ttft_ms`` runs from call entry until
    the first token was on the host."""

    ttft_ms: float
    total_ms: float
    tokenize_ms: float
    queue_ms: float
    """Waiting for others, in a batch."""
    plan_ms: float
    fetch_ms: float
    assemble_ms: float
    probe_ms: float
    repair_ms: float
    prefill_ms: float
    decode_ms: float
    admit_ms: float


class SpanKind(str, Enum):
    EXACT = "exact"
    """Same tokens behind the same everything: the KV is what the model would compute."""
    APPROXIMATE = "approximate"
    """Same tokens behind the same everything, but computed on top of moved rows: this
    conversation's own past, used as it is."""
    MOVED = "moved"
    """Same tokens at another place or behind other text: keys turned to their new positions, some
    rows recomputed."""
    COMPUTE = "compute"
    """Not known: computed for this request."""


@dataclass(frozen=True)
class Span:
    """Rows ``[start, end)`` of the prompt and where they come from."""

    kind: SpanKind
    start: int
    end: int
    donor: str | None = None
    """The key of the chunk that serves these rows."""
    offset: int = 0
    """Which of the donor's rows is the first."""
    resemblance: float = 0.0
    """Of a moved span: how alike what stands before it and what stood before its donor are."""
    tier: str | None = None
    """Where the donor lay: ``"gpu"``, ``"ram"``, ``"disk"`` or ``"remote"``; ``"shared"``: the rows
    are those of a request that was running."""

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class ReuseReport:
    """How a prompt is served: spans cover it from first to last token without gaps."""

    spans: tuple[Span, ...]
    notes: tuple[str, ...] = ()
    strategy: str | None = None
    """What repaired the moved rows; None when none were."""
    recomputed: tuple[int, ...] = ()
    """Moved rows that were computed again, in order."""
    charged_tokens: float = 0.0
    """What repair cost, in rows through all layers: recomputed rows, and the part of the layers
    that probes ran."""

    @property
    def prompt_tokens(self) -> int:
        return self.spans[-1].end if self.spans else 0

    def count(self, kind: SpanKind) -> int:
        return sum(span.num_tokens for span in self.spans if span.kind is kind)

    @property
    def cached_tokens(self) -> int:
        """Rows that are really not computed."""
        return self.prompt_tokens - self.count(SpanKind.COMPUTE) - len(self.recomputed)

    @property
    def charged_share(self) -> float:
        """``charged_tokens`` per moved row."""
        moved = self.count(SpanKind.MOVED)
        return self.charged_tokens / moved if moved else 0.0

    @property
    def kv_reuse_ratio(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.spans else 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """One generated token under the model's own distribution (before penalties and sampling)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class GenerationResult:
    """The answer to one request, how long it took, and where its prompt's rows came from."""

    output_text: str
    token_ids: list[int]
    finish_reason: str
    """``"stop"`` (end of sequence or a stop string), ``"length"`` (the limit was reached) or
    ``"cancelled"`` (the stream was left early), ``"timeout"`` (its time was over); ``"error"`` if
    the request failed."""
    timings: Timings
    reuse: ReuseReport
    logprobs: list[TokenLogprob] | None = None

    @property
    def spans(self) -> Sequence[Span]:
        return self.reuse.spans

    @property
    def prompt_tokens(self) -> int:
        return self.reuse.prompt_tokens

    @property
    def cached_tokens(self) -> int:
        return self.reuse.cached_tokens

    @property
    def exact_tokens(self) -> int:
        return self.reuse.count(SpanKind.EXACT)

    @property
    def approximate_tokens(self) -> int:
        """Rows of this conversation's own past that stand on moved ones."""
        return self.reuse.count(SpanKind.APPROXIMATE)

    @property
    def moved_tokens(self) -> int:
        """Rows whose text was read at another place; ``recomputed_tokens`` of them were computed
        again."""
        return self.reuse.count(SpanKind.MOVED)

    @property
    def recomputed_tokens(self) -> int:
        return len(self.reuse.recomputed)

    @property
    def kv_reuse_ratio(self) -> float:
        return self.reuse.kv_reuse_ratio

    @property
    def ttft_ms(self) -> float:
        return self.timings.ttft_ms

    @property
    def total_ms(self) -> float:
        return self.timings.total_ms

    @property
    def generated_tokens(self) -> int:
        """How many tokens the answer has."""
        return len(self.token_ids)

    @property
    def tokens_per_sec(self) -> float:
        """Generated tokens over the whole time of the call."""
        return self.generated_tokens / (self.total_ms / 1e3) if self.total_ms else 0.0

    def __repr__(self) -> str:
        text = self.output_text
        shown = text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"
        return (
            f"GenerationResult({shown!r}, {self.generated_tokens:,} tokens, "
            f"{self.finish_reason!r}; prompt of {self.prompt_tokens:,} tokens, "
            f"{self.kv_reuse_ratio:.0%} reused; first token after {self.ttft_ms:,.0f} ms, "
            f"all after {self.total_ms:,.0f} ms)"
        )


def kl_divergence(expected: Any, actual: Any) -> Any:
    """KL(expected || actual) of every row of logits, two tensors, in float64: ``[rows]``."""
    log_p, log_q = (logits.cpu().double().log_softmax(-1) for logits in (expected, actual))
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@dataclass(frozen=True)
class Score:
    """What ``score`` gives back. ``logits`` is a tensor ``[continuation, vocab]``."""

    logits: Any
    timings: Timings
    reuse: ReuseReport


@dataclass(frozen=True)
class Arrangement:
    """What ``arrange`` gives back."""

    prompt: list[int]
    """Token ids for ``generate``."""
    order: tuple[int, ...]
    """Which of the documents stands where: the first is ``documents[order[0]]``."""
    exact_tokens: int
    """How many tokens of the prompt are expected not to be read again."""
    exact_tokens_as_given: int
    """The same for the documents in the order they were given in."""

    @property
    def saved_tokens(self) -> int:
        """What arranging saves."""
        return self.exact_tokens - self.exact_tokens_as_given


@dataclass(frozen=True)
class CalibrationStep:
    """Of one ratio: mean KL to a full prefill, and what repair cost per moved row."""

    ratio: float
    mean_kl: float
    charged_share: float


@dataclass(frozen=True)
class Calibration:
    """What ``calibrate`` found: ``ratio`` is the smallest tried that holds ``max_kl``."""

    ratio: float
    max_kl: float
    steps: tuple[CalibrationStep, ...]

    @property
    def holds(self) -> bool:
        """False if not even recomputing everything stays within ``max_kl``, which 16-bit rounding
        may exceed."""
        return self.steps[-1].mean_kl <= self.max_kl


@dataclass(frozen=True)
class VerificationReport:
    """What ``verify_correctness`` saw. Truthy only if the cache was really used and agreed."""

    prompts: int
    reused_share: float
    """Share of the prompt tokens that came from the cache."""
    max_logit_delta: float
    mean_kl: float
    tokens_equal: bool
    tolerance_logit: float
    tolerance_kl: float
    problems: tuple[str, ...] = field(default=())

    def __bool__(self) -> bool:
        return not self.problems
