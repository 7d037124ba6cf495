"""The bodies and the responses of ``/v1/embeddings`` and ``/v1/rerank``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Tag

from kvboost.serve.schema import fields, replies


class EmbeddingRequest(fields.Body):
    model: fields.Text
    input: Annotated[
        Annotated[fields.SomeText, Tag("as text")]
        | Annotated[list[fields.SomeText], fields.some(fields.MAX_INPUTS), Tag("as texts")]
        | Annotated[fields.TokenIds, Tag("as ids")]
        | Annotated[list[fields.TokenIds], fields.some(fields.MAX_INPUTS), Tag("as lists of ids")],
        fields.several_prompts(fields.MAX_INPUTS),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: fields.MaxTokens | None = None
    """Only the model's own number: its vectors cannot be shortened."""
    truncate_prompt_tokens: fields.Truncate | None = None
    user: fields.Text | None = None

    def inputs(self) -> list[str] | list[list[int]]:
        return fields.as_prompts(self.input)


class RerankRequest(fields.Body):
    """Documents to sort by how close they are to a query."""

    model: fields.Text
    query: fields.SomeText
    documents: Annotated[list[fields.SomeText], fields.some(fields.MAX_INPUTS)]
    top_n: fields.MaxTokens | None = None
    return_documents: bool | None = None
    truncate_prompt_tokens: fields.Truncate | None = None
    user: fields.Text | None = None


class EmbeddingReply(replies.Reply):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Numbers, or 32-bit numbers (little-endian) in base64."""


class EmbeddingUsage(replies.Reply):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(replies.ListOf[EmbeddingReply]):
    model: str
    usage: EmbeddingUsage


class RankedText(replies.Reply):
    text: str


class Ranked(replies.Reply):
    index: int
    """The number of the document in the request."""
    relevance_score: float
    """The cosine of the angle between the embeddings of query and document."""
    document: RankedText | None = None


class Ranking(replies.Reply):
    id: str
    model: str
    results: list[Ranked]
    usage: EmbeddingUsage
