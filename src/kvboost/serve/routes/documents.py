"""``/kvboost/documents`` and ``/kvboost/sessions``: for every tenant, about its own."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Depends, Path, Query, Request
from starlette.responses import JSONResponse, Response

from kvboost.serve.answers.prompts import encode
from kvboost.serve.auth import Place, Tenant
from kvboost.serve.documents import titled
from kvboost.serve.errors import ApiError
from kvboost.serve.http.bodies import BodyRoute, receive_body
from kvboost.serve.http.openapi import EACH_ONCE, Router
from kvboost.serve.schema import replies
from kvboost.serve.schema.own import DocumentUpload
from kvboost.serve.server import Caller, Server, ServerState

router = Router(
    prefix="/kvboost", tags=["documents"], route_class=BodyRoute, dependencies=[EACH_ONCE]
)

Salt = Annotated[str, Query(max_length=512, description="The cache_salt of its requests.")]


async def _place(caller: Caller, cache_salt: Salt = "") -> Place:
    return caller.place(cache_salt)


OwnPlace = Annotated[Place, Depends(_place)]
Title = Annotated[str | None, Query(max_length=512, description="A line before the text.")]
Id = Annotated[str, Path(min_length=1, max_length=512)]


@router.endpoint("POST /documents", replies.DocumentReply, 409)
async def upload_document(body: DocumentUpload, server: Server, caller: Caller) -> Response:
    """Keeps a text and reads it in the background. Its id depends only on title and text, so the
    same document can be sent any number of times. A content part ``{"type": "document",
    "document_id": ...}`` of a chat message stands for it."""
    return await _upload(server, caller, body.cache_salt, body.text, body.title)


@router.endpoint(
    "POST /files",
    replies.DocumentReply,
    409,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"text/plain": {"schema": {"type": "string", "minLength": 1}}},
        }
    },
)
async def upload_file(
    request: Request, server: Server, caller: Caller, title: Title = None, cache_salt: Salt = ""
) -> Response:
    """The same for a text file, which is the body: UTF-8, with a content type of text."""
    data = await receive_body(request, server.settings)
    kind = request.headers.get("content-type", "")
    if not kind.strip().lower().startswith("text/"):
        said = f"a file must be text, not {kind[:80]!r}: send 'Content-Type: text/plain'"
        raise ApiError(415, f"{said} and its text in UTF-8", "not_text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        said = f"the file is not UTF-8: byte {error.start:,} is wrong"
        raise ApiError(400, said, "not_utf8") from None
    if not text:
        raise ApiError(400, "the file is empty", "invalid_value")
    return await _upload(server, caller, cache_salt, text, title)


@router.endpoint("GET /documents", replies.ListOf[replies.DocumentReply], 400)
async def list_documents(server: Server, place: OwnPlace) -> Response:
    """The documents of the caller."""
    found = server.documents.all(place)
    return JSONResponse({"object": "list", "data": [one.describe() for one in found]})


@router.endpoint("GET /documents/{document_id}", replies.DocumentWithText, 400, 404)
async def get_document(document_id: Id, server: Server, place: OwnPlace) -> Response:
    """One document with its text."""
    document = server.documents.get(place, document_id)
    return JSONResponse({**document.describe(), "text": document.text})


@router.endpoint("DELETE /documents/{document_id}", replies.Deleted, 400, 404)
async def delete_document(document_id: Id, server: Server, place: OwnPlace) -> Response:
    """Deletes the text. Its KV is evicted some time, or forgotten by ``/kvboost/forget``."""
    await server.documents.delete(place, document_id)
    return JSONResponse({"id": document_id, "deleted": True})


@router.endpoint("GET /sessions", replies.ListOf[replies.SessionReply], 400)
async def list_sessions(server: Server, place: OwnPlace) -> Response:
    """The caller's conversations whose KV is pinned (``kvboost.session`` of a request)."""
    return JSONResponse({"object": "list", "data": server.sessions.all(place)})


@router.endpoint("GET /sessions/{session_id}", replies.SessionReply, 400, 404)
async def get_session(session_id: Id, server: Server, place: OwnPlace) -> Response:
    """One session: its turns, the size of its KV and the time that is left."""
    return JSONResponse(server.sessions.get(place, session_id))


@router.endpoint("DELETE /sessions/{session_id}", replies.Deleted, 400, 404)
async def delete_session(session_id: Id, server: Server, place: OwnPlace) -> Response:
    """Ends a session: its KV may be evicted from now on."""
    await asyncio.to_thread(server.sessions.delete, place, session_id)
    return JSONResponse({"id": session_id, "deleted": True})


async def _upload(
    server: ServerState, caller: Tenant, cache_salt: str, text: str, title: str | None
) -> Response:
    whole = titled(text, title)
    ids = await server.workers.tokenize(caller.counts_as, len(whole), encode, server.engine, whole)
    document = server.documents.add(caller, cache_salt, text, len(ids), title)
    return JSONResponse(document.describe())
