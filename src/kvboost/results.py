"""The result of a request: text, tokens, times, and the source of every prompt row."""

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
    "verify",
    "admit",
)


class Clock:
    """Splits one request's time into phases that add up to the total.

    The clock starts when it is created, at call entry. ``lap`` charges the time since the last lap
    to a phase, so no time is counted twice and none is lost.
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
        """Leaves out time that the caller spent between two pieces of a stream."""
        self._start += seconds
        self._last += seconds
        if self._first_token is not None:
            self._first_token += seconds

    def first_token(self) -> None:
        """Marks the moment when the first token is on the host."""
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
    """Milliseconds. The phases add up to ``total_ms``. ``ttft_ms`` is the time from call entry
    until the first token is on the host."""

    ttft_ms: float
    total_ms: float
    tokenize_ms: float
    queue_ms: float
    """Waiting for other requests, in a batch."""
    plan_ms: float
    fetch_ms: float
    assemble_ms: float
    probe_ms: float
    repair_ms: float
    prefill_ms: float
    decode_ms: float
    verify_ms: float
    """Of a verified answer: the draft, and the exact pass over prompt and draft."""
    admit_ms: float


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
        return sum(span.num_tokens for span in self.spans if span.kind is kind)

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


@dataclass(frozen=True)
class TokenLogprob:
    """One generated token under the model's own distribution (before penalties and sampling)."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class ToolCall:
    """A call that the model asks for."""

    name: str
    """The tool's."""
    arguments: str
    """JSON text, as the model wrote it."""


@dataclass(frozen=True)
class ParsedAnswer:
    """An answer in its parts."""

    content: str
    """The text for the user."""
    reasoning: str = ""
    """What the model wrote between ``<think>`` and ``</think>``."""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class AnswerAudit:
    """An answer over approximate rows, compared with the exact distributions at its positions."""

    compared_tokens: int
    """How many tokens were compared: of a greedy answer all, of others the first 16."""
    agreement: float
    """The share of them at which the likeliest token was the same."""
    first_divergence: int | None
    """The first token at which it was not; None if there is none."""
    mean_kl: float | None
    """KL(exact || answer's own), averaged over the first 16 tokens. The 64 tokens that the answer's
    distribution had as likeliest are told apart, the others are one outcome: so this is never
    larger than the KL over all tokens, and close to it if these 64 have most of the mass."""


@dataclass
class Healing:
    """What becomes of the approximate rows of one request: the engine computes them again, exactly,
    when it is idle, or on a GPU while the request answers. Changes until ``status`` is final."""

    approximate_tokens: int
    """Rows of prompt and answer that were approximate when the answer ended, or when it became
    exact."""
    healed_tokens: int = 0
    """How many of them are exact in the cache by now. They are the first ones, without gaps."""
    status: str = "waiting"
    """``"waiting"``; ``"done"``; ``"dropped"`` (too many waited, or something was forgotten);
    ``"failed"``."""
    audit: AnswerAudit | None = None
    """How far the answer was from an exact one, once it has been healed."""
    draft: tuple[int, ...] | None = None
    """Of a verified answer: the tokens that were drafted, before the answer was released."""


@dataclass(frozen=True)
class Speculated:
    """The drafts of one answer."""

    drafted: int = 0
    """How many tokens were drafted, and run as rows of a forward."""
    accepted: int = 0
    """How many of them are tokens of the answer."""


@dataclass(frozen=True)
class HealReport:
    """The result of ``heal``."""

    conversations: int
    """How many were healed to their end."""
    tokens: int
    """How many rows became exact."""
    waiting: int
    """How many conversations are left: time ran out, or they were interrupted."""


_SHOWN_CHARACTERS = 60


@dataclass(frozen=True)
class GenerationResult:
    """The answer to one request, how long it took, and where its prompt's rows came from."""

    output_text: str
    token_ids: list[int]
    finish_reason: str
    """``"stop"`` (end of sequence or a stop string), ``"length"`` (the limit was reached),
    ``"cancelled"`` (the stream was closed early), ``"timeout"`` or ``"error"``."""
    timings: Timings
    reuse: ReuseReport
    logprobs: list[TokenLogprob] | None = None
    parsed: ParsedAnswer | None = None
    """The parts of an answer of ``chat``; None if there is only content."""

    answer_exact_from: int = 0
    """The tokens of the answer from this one on were drawn from exact distributions: 0 if all of
    them were, ``generated_tokens`` if none. Healing changes the cache, never an answer that was
    given, and so not this number."""
    healing: Healing | None = None
    """What becomes of the approximate rows; None if there are none, or if they are not healed."""
    speculated: Speculated = Speculated()

    @property
    def content(self) -> str:
        """The answer's text without reasoning and calls of tools."""
        return self.output_text if self.parsed is None else self.parsed.content

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls that the model asks for."""
        return () if self.parsed is None else self.parsed.tool_calls

    @property
    def healed_tokens(self) -> int:
        """How many approximate rows of this request are exact in the cache by now. Grows while the
        engine is idle; ``engine.heal()`` waits for it."""
        return self.healing.healed_tokens if self.healing is not None else 0

    @property
    def drafted_tokens(self) -> int:
        """How many tokens were drafted before they were picked: by speculation, or of a verified
        answer over moved text."""
        return self.speculated.drafted + len(self._draft)

    @property
    def accepted_tokens(self) -> int:
        """How many of the drafted tokens are tokens of the answer. ``drafted_tokens`` less these
        are rows that were computed for nothing."""
        return self.speculated.accepted + self.confirmed_tokens

    @property
    def confirmed_tokens(self) -> int:
        """How many tokens at the beginning of a verified answer are those of its draft."""
        pairs = zip(self._draft, self.token_ids, strict=False)
        return next((i for i, (ours, its) in enumerate(pairs) if ours != its), len(self._draft))

    @property
    def _draft(self) -> tuple[int, ...]:
        return (self.healing and self.healing.draft) or ()

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
        """Rows of this conversation's past that were computed on top of moved rows."""
        return self.reuse.count(SpanKind.APPROXIMATE)

    @property
    def moved_tokens(self) -> int:
        """Rows whose text was read at another position; ``recomputed_tokens`` of them were
        recomputed."""
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
    """The result of ``score``. ``logits`` is a tensor ``[continuation, vocab]``."""

    logits: Any
    timings: Timings
    reuse: ReuseReport


@dataclass(frozen=True)
class Arrangement:
    """The result of ``arrange``."""

    prompt: list[int]
    """Token ids for ``generate``."""
    order: tuple[int, ...]
    """The order of the documents: the first is ``documents[order[0]]``."""
    exact_tokens: int
    """How many tokens of the prompt an exact hit is expected to cover."""
    exact_tokens_as_given: int
    """The same for the documents in the order given."""

    @property
    def saved_tokens(self) -> int:
        """How many more tokens the exact hit covers than in the order given."""
        return self.exact_tokens - self.exact_tokens_as_given


@dataclass(frozen=True)
class Pin:
    """A text whose KV is not evicted."""

    name: str
    tokens: int
    """The first tokens of the text: all of them, unless only a part was cached."""
    chunks: int
    bytes: int
    """Of its chunks, also of those that other pins hold as well."""
    ttl: float | None
    """Seconds until it ends; None: it ends with :meth:`KVBoost.unpin` or the engine."""


@dataclass(frozen=True)
class CalibrationStep:
    """What was tried: a ratio, and with ``auto`` a tolerance. Mean KL to a full prefill, and repair
    cost per moved row."""

    ratio: float
    mean_kl: float
    charged_share: float
    tolerance: float | None = None


@dataclass(frozen=True)
class Calibration:
    """The result of ``calibrate``: the cheapest settings tried that hold ``max_kl``. ``tolerance``
    is None if the strategy repairs in one round."""

    ratio: float
    max_kl: float
    steps: tuple[CalibrationStep, ...]
    tolerance: float | None = None

    @property
    def holds(self) -> bool:
        """False if even recomputing everything exceeds ``max_kl``. 16-bit rounding can do that."""
        return self.steps[-1].mean_kl <= self.max_kl


@dataclass(frozen=True)
class VerificationReport:
    """The result of ``verify_correctness``. Truthy only if hits happened and answers agreed."""

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


LONGEST_ADAPTER_NAME = 256


@dataclass(frozen=True)
class AdapterInfo:
    """An adapter that requests can name."""

    name: str
    path: str
    digest: str
    """Identifies its weights and settings. Cached text is kept apart by it, not by the name."""
    rank: int
    """The largest of its ranks."""
    num_modules: int
    """How many linear layers it changes."""
    num_bytes: int
    is_activated: bool
    """Whether it applies from its invocation tokens on (aLoRA)."""
