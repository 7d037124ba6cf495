"""What a request gives back: text, tokens, true times, and where every prompt row came from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

PHASES = (
    "tokenize",
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

    def lap(self, phase: str) -> None:
        now = time.perf_counter()
        self._seconds[phase] += now - self._last
        self._last = now

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

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class ReuseReport:
    """How a prompt is served: spans cover it from first to last token without gaps."""

    spans: tuple[Span, ...]
    notes: tuple[str, ...] = ()

    @property
    def prompt_tokens(self) -> int:
        return self.spans[-1].end if self.spans else 0

    def count(self, kind: SpanKind) -> int:
        return sum(span.num_tokens for span in self.spans if span.kind is kind)

    @property
    def cached_tokens(self) -> int:
        """Rows that are really not computed."""
        return self.prompt_tokens - self.count(SpanKind.COMPUTE)

    @property
    def kv_reuse_ratio(self) -> float:
        return self.cached_tokens / self.prompt_tokens if self.spans else 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """One generated token under the model's own distribution (before penalties and sampling)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class GenerationResult:
    output_text: str
    token_ids: list[int]
    finish_reason: str
    """``"stop"`` (end of sequence or a stop string), ``"length"`` (the limit was reached) or
    ``"cancelled"`` (the stream was left early); ``"error"`` if the request failed."""
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
    def moved_tokens(self) -> int:
        return 0

    @property
    def recomputed_tokens(self) -> int:
        return 0

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
    def tokens_per_sec(self) -> float:
        """Generated tokens over the whole time of the call."""
        return len(self.token_ids) / (self.total_ms / 1e3) if self.total_ms else 0.0


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
