"""The responses about documents, sessions and pins in the OpenAPI document."""

from __future__ import annotations

from typing import Literal

from kvboost.serve.response_models import Reply


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


class DocumentList(Reply):
    object: Literal["list"]
    data: list[DocumentReply]


class SessionReply(Reply):
    id: str
    object: Literal["session"]
    created: int
    turns: int
    tokens: int
    """Prompt and answer of the last turn, as far as they are pinned."""
    bytes: int
    expires_in: float


class SessionList(Reply):
    object: Literal["list"]
    data: list[SessionReply]


class Deleted(Reply):
    id: str
    deleted: Literal[True]


class PinReply(Reply):
    name: str
    tokens: int
    chunks: int
    bytes: int
    ttl: float | None


class PinList(Reply):
    object: Literal["list"]
    data: list[PinReply]
    bytes: int
    """Of all pinned chunks; one that several pins hold counts once."""
    max_bytes: int
