"""Responses of Ollama's API in the OpenAPI document."""

from __future__ import annotations

from typing import Any, Literal

from kvboost.serve.schema.replies import Reply, ReuseReply


class OllamaErrorReply(Reply):
    error: str


class OllamaMessageReply(Reply):
    role: Literal["assistant"]
    content: str
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    """Their arguments are objects."""


class OllamaAnswer(Reply):
    """The fields that chat and generate share. Durations are in nanoseconds. Without a question
    there are no counts, and ``done_reason`` is ``load``."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"]
    total_duration: int | None = None
    load_duration: int | None = None
    """The time that the request waited for the model."""
    prompt_eval_count: int | None = None
    """Tokens of the whole prompt, reused or not."""
    prompt_eval_duration: int | None = None
    eval_count: int | None = None
    eval_duration: int | None = None
    logprobs: list[dict[str, Any]] | None = None
    kvboost: ReuseReply | None = None


class OllamaChatReply(OllamaAnswer):
    message: OllamaMessageReply


class OllamaGenerateReply(OllamaAnswer):
    response: str
    thinking: str | None = None


class EmbedReply(Reply):
    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class LegacyEmbedReply(Reply):
    embedding: list[float]


class OllamaModel(Reply):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: dict[str, Any]


class OllamaModels(Reply):
    models: list[OllamaModel]


class RunningModel(OllamaModel):
    expires_at: str
    size_vram: int
    context_length: int


class RunningModels(Reply):
    models: list[RunningModel]


class ShowReply(Reply):
    modified_at: str
    details: dict[str, Any]
    model_info: dict[str, Any]
    capabilities: list[str]
