"""The responses in the OpenAPI document. Routes build plain dicts, because they need one per token;
the tests compare them with these models."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from kvboost.results import AnswerAudit, Divergence, Part, Pin

T = TypeVar("T")


class Reply(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ListOf(Reply, Generic[T]):
    object: Literal["list"]
    data: list[T]


class ErrorDetail(Reply):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Reply):
    error: ErrorDetail


class SpanReply(Reply):
    """Rows ``[start, end)`` of the prompt and their source."""

    kind: Literal["exact", "approximate", "moved", "compute"]
    start: int
    end: int
    tokens: int
    recomputed: int
    donor: str | None
    tier: str | None
    resemblance: float
    text: str | None = None


class PlannedReuse(Reply):
    mode: str
    strategy: str
    exact_tokens: int
    approximate_tokens: int
    moved_tokens: int
    recomputed_tokens: int
    computed_tokens: int
    estimated_ms_without_reuse: float | None
    notes: list[str]
    spans: list[SpanReply]


class ReuseReply(PlannedReuse):
    """The source of every row of the prompt. ``moved_tokens`` includes ``recomputed_tokens``."""

    charged_tokens: float
    answer_exact_from: int
    """The first token of the answer that was drawn from an exact distribution: 0 if all were."""
    healed_tokens: int
    """Approximate rows that were exact when this was written; more are healed afterwards."""
    drafted_tokens: int
    accepted_tokens: int
    """Tokens that were drafted before they were picked, and those that are in the answer."""
    ttft_ms: float
    queue_ms: float
    total_ms: float


class ExplanationReply(Reply):
    """Why each part of a prompt was or was not reused."""

    prompt_tokens: int
    computed_tokens: int
    divergence: Divergence | None
    parts: list[Part]
    notes: list[str]
    map: list[Literal["exact", "approximate", "moved", "recomputed", "compute"]]
    """The prompt in 64 cells of equal length: what most tokens of each are."""


class AnswerSummary(Reply):
    id: str
    object: Literal["kvboost.explanation"]
    created: int
    prompt_tokens: int
    cached_tokens: int


class AnswerExplanation(AnswerSummary):
    explanations: list[ExplanationReply]
    """One for each prompt."""


class PlanReply(PlannedReuse):
    """A plan. The model decides which moved rows are recomputed, so none are counted here."""

    prompt_tokens: int
    explanation: ExplanationReply


class Tokenized(Reply):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(Reply):
    prompt: str


class Version(Reply):
    version: str


class PromptDetails(Reply):
    cached_tokens: int
    """Rows that were not computed."""
    exact_tokens: int
    """Those of them that are what the model would have computed."""


class CompletionDetails(Reply):
    """Tokens that speculation drafted: those of the answer, and the others."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Reply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class ToolUsesCleared(Reply):
    type: Literal["clear_tool_uses_20250919"]
    cleared_tool_uses: int
    cleared_input_tokens: int


class ThinkingCleared(Reply):
    type: Literal["clear_thinking_20251015"]
    cleared_thinking_turns: int
    cleared_input_tokens: int


class EditsReply(Reply):
    """The edits that changed a conversation before it was read."""

    applied_edits: list[Annotated[ToolUsesCleared | ThinkingCleared, Field(discriminator="type")]]


class TopLogprob(Reply):
    token: str
    logprob: float
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Reply):
    content: list[ChatLogprob]
    refusal: None


class CalledFunction(Reply):
    name: str
    arguments: str
    """JSON text."""


class CallReply(Reply):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Reply):
    role: Literal["assistant"]
    content: str | None
    """Null if the answer only calls tools."""
    refusal: None
    reasoning_content: str | None = None
    tool_calls: list[CallReply] | None = None


class PromptLogprob(Reply):
    """A token at one place of a prompt: the prompt's own, or one of the likeliest."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id, for each token of a prompt; the first has none."""


class ChatChoice(Reply):
    index: int
    message: ChatMessage
    finish_reason: Literal["stop", "length", "tool_calls"]
    logprobs: ChatLogprobs | None
    token_ids: list[int] | None = None
    kvboost: ReuseReply | None = None


class AnyCompletion(Reply):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    kvboost: ReuseReply


class ChatCompletion(AnyCompletion):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    context_management: EditsReply | None = None
    """There if the request has this field."""


class CompletionLogprobs(Reply):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class CompletionChoice(Reply):
    index: int
    text: str
    finish_reason: Literal["stop", "length"]
    logprobs: CompletionLogprobs | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    kvboost: ReuseReply | None = None


class Completion(AnyCompletion):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class ModelReply(Reply):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    context_length: int | None
    max_model_len: int | None
    """The same in vLLM's words."""


class AdapterReply(ModelReply):
    parent: str
    """The name of the model that it adapts."""
    digest: str
    """Identifies its content; text is cached under it."""
    rank: int


class Unloaded(Reply):
    id: str
    object: Literal["model"]
    deleted: Literal[True]


class Health(Reply):
    status: str
    warmed: int | None = None
    to_warm: int | None = None
    """Documents that the server starts with: how many are read, and how many there are."""


class Forgotten(Reply):
    forgotten: int


class ChunkReply(BaseModel):
    """One stored chunk."""

    model_config = ConfigDict(extra="allow")

    key: str
    text: str
    tokens: int
    bytes: int


class CacheReply(Reply):
    stats: dict[str, Any]
    serving: dict[str, Any]
    chunks: list[ChunkReply]


class LiveRequest(Reply):
    """One answer that has ended, without its text."""

    seq: int
    at: float
    request_id: str
    ttft_ms: float | None
    total_ms: float
    estimated_ms: float | None
    prompt_tokens: int
    exact: int
    approximate: int
    moved: int
    recomputed: int
    computed: int
    completion_tokens: int
    finish_reason: str
    tenant: str


class ReadingReply(Reply):
    """How far a running answer without a first token is with its prompt."""

    request_id: str
    prompt_tokens: int
    known_tokens: int
    """Tokens that are not computed, moved ones included."""
    moved_tokens: int
    read_tokens: int
    """Tokens whose rows are in place, known ones included; counted after each slice. With moved
    tokens it stays 0 until all are."""
    estimated_ms_without_reuse: float | None


class HealedRequest(Reply):
    """The healing of one of the last answers."""

    request_id: str
    approximate_tokens: int
    healed_tokens: int
    status: Literal["waiting", "done", "replaced", "dropped", "failed"]
    audit: AnswerAudit | None


class LiveReply(Reply):
    seq: int
    now: float
    uptime_s: float
    model: str
    context_length: int | None
    needs_key: bool
    version: str
    facts: dict[str, Any]
    requests: list[LiveRequest]
    reading: list[ReadingReply]
    healed_requests: list[HealedRequest]
    healing: dict[str, Any]
    audit: dict[str, Any]
    tiers: dict[str, dict[str, Any]]
    queue: dict[str, Any]


class DocumentReply(Reply):
    id: str
    object: Literal["document"]
    title: str | None
    tokens: int
    bytes: int
    created: int
    status: Literal["waiting", "reading", "ready", "failed"]
    """Whether it has been read in advance. It can be used at any time."""
    error: str | None


class DocumentWithText(DocumentReply):
    text: str
    """As prompts contain it, title included."""


class SessionReply(Reply):
    id: str
    object: Literal["session"]
    created: int
    turns: int
    tokens: int
    """Prompt and answer of the last turn, as far as they are pinned."""
    bytes: int
    expires_in: float


class Deleted(Reply):
    id: str
    deleted: Literal[True]


class PinList(ListOf[Pin]):
    bytes: int
    """Of all pinned chunks; one that several pins hold counts once."""
    max_bytes: int
