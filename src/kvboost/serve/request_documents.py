"""What clients may send about documents and pins."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, Tag

from kvboost.serve.request_fields import (
    OwnBody,
    ShortText,
    SomeText,
    Text,
    TokenIds,
    has,
    one_of,
)

MAX_TTL = 30 * 24 * 3600.0
"""Seconds for which anything may be pinned over HTTP, unless it has no end."""

Ttl = Annotated[float, Field(gt=0.0, le=MAX_TTL)]
SessionId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:-]{0,127}$")]


class DocumentUpload(OwnBody):
    """A document to keep and to read in advance."""

    text: SomeText
    title: ShortText | None = None
    """A line before the text, part of every prompt that has the document."""
    cache_salt: ShortText = ""


class _PinRequest(OwnBody):
    ttl: Ttl | None = None
    """Seconds; without it the pin has no end."""
    cache_salt: ShortText = ""
    tenant: Text | None = None
    """The name of the key to pin for. Default: the caller's own."""


class PinText(_PinRequest):
    """A text to read and to keep from being evicted."""

    text: SomeText
    header: Text | None = None
    """The text before it. Default: the beginning of a user's first message."""


class PinIds(_PinRequest):
    """Token ids to read and to keep from being evicted: the beginning of prompts."""

    token_ids: TokenIds


class PinDocument(_PinRequest):
    """A document to keep from being evicted."""

    document_id: ShortText


def _pin_kind(body: object) -> str | None:
    models = {"text": PinText, "token_ids": PinIds, "document_id": PinDocument}
    given = [
        field for field, model in models.items() if isinstance(body, model) or has(body, field)
    ]
    return f"by {given[0]}" if len(given) == 1 else None


PinRequest = Annotated[
    Annotated[PinText, Tag("by text")]
    | Annotated[PinIds, Tag("by token_ids")]
    | Annotated[PinDocument, Tag("by document_id")],
    one_of(_pin_kind, "an object with one of 'text', 'token_ids' and 'document_id'"),
]
