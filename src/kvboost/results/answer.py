"""The answer to one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvboost.results.explanation import Explanation
from kvboost.results.reuse import ReuseReport
from kvboost.results.spans import Span, SpanKind
from kvboost.results.timings import Timings

_SHOWN_CHARACTERS = 60


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
    """The text that the model wrote between ``<think>`` and ``</think>``."""
    tool_calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True)
class AppliedEdit:
    """An edit of ``context_management`` that changed a conversation before it was read."""

    type: str
    cleared_input_tokens: int
    """The number of tokens by which the prompt became shorter."""
    cleared_tool_uses: int | None = None
    """The number of cleared results of tools; None if the edit clears no results."""
    cleared_thinking_turns: int | None = None
    """The number of turns that lost their reasoning; None if the edit clears no reasoning."""

    def as_dict(self) -> dict[str, str | int]:
        """The edit as Anthropic's API reports it."""
        return {name: value for name, value in vars(self).items() if value is not None}


@dataclass(frozen=True)
class AnswerAudit:
    """An answer over approximate rows, compared with the exact distributions at its positions."""

    compared_tokens: int
    """The number of compared tokens: of a greedy answer all, of others the first 16."""
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
    """The healing of one request's approximate rows: the engine computes them again, exactly,
    when it is idle, or on a GPU while the request answers. Changes until ``status`` is final."""

    approximate_tokens: int
    """Rows of prompt and answer that were approximate when the answer ended or became exact."""
    healed_tokens: int = 0
    """The number of them that became exact in the cache before ``status`` was final. They are the
    first ones, without gaps."""
    status: str = "waiting"
    """``"waiting"``; ``"done"``; ``"replaced"`` (the conversation went on, so that its next turn is
    healed in place of this one); ``"dropped"`` (too many waited, or something was forgotten);
    ``"failed"``."""
    audit: AnswerAudit | None = None
    """The distance of the answer from an exact one; None unless ``status`` is ``"done"``."""


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
    prompt_logprobs: list[TokenLogprob] | None = None
    """Those of the prompt's tokens from the second on, if they were asked for."""
    parsed: ParsedAnswer | None = None
    """The parts of an answer of ``chat``; None if there is only content."""
    applied_edits: tuple[AppliedEdit, ...] = ()
    """The edits of ``context_management`` that changed the conversation."""

    answer_exact_from: int = 0
    """The tokens of the answer from this one on were drawn from exact distributions: 0 if all of
    them were, ``generated_tokens`` if none. Healing changes the cache, never an answer that was
    given, and so not this number."""
    healing: Healing | None = None
    """The healing of the approximate rows; None if there are none, or if they are not healed."""
    drafted_tokens: int = 0
    """The number of tokens that speculation drafted, and ran as rows of a forward."""
    accepted_tokens: int = 0
    """The number of drafted tokens that are tokens of the answer. ``drafted_tokens`` less these are
    rows that were computed for nothing."""

    def explain(self, *, other_salts: bool = True) -> Explanation:
        """Why each part of the prompt was or was not reused; see :meth:`ReuseReport.explain`."""
        return self.reuse.explain(other_salts=other_salts)

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
        """The number of this request's approximate rows that are exact in the cache by now. Grows
        while the engine is idle; ``engine.heal()`` waits for it."""
        return self.healing.healed_tokens if self.healing is not None else 0

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
        """Rows whose text was read at another position, ``recomputed_tokens`` included."""
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
        """The number of tokens of the answer."""
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
