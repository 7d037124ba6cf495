"""The responses about embeddings in the OpenAPI document."""

from __future__ import annotations

from typing import Literal

from kvboost.serve.response_models import Reply


class EmbeddingReply(Reply):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Numbers, or 32-bit numbers (little-endian) in base64."""


class EmbeddingUsage(Reply):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Reply):
    object: Literal["list"]
    data: list[EmbeddingReply]
    model: str
    usage: EmbeddingUsage


class RankedText(Reply):
    text: str


class Ranked(Reply):
    index: int
    """The number of the document in the request."""
    relevance_score: float
    """The cosine of the angle between the embeddings of query and document."""
    document: RankedText | None = None


class Ranking(Reply):
    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage
