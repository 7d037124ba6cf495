"""``/kvboost/explain``: for every tenant, about its own answers."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Path
from starlette.responses import JSONResponse, Response

from kvboost.serve.explanations import Answered, with_documents
from kvboost.serve.http.bodies import BodyRoute
from kvboost.serve.http.openapi import EACH_ONCE, Router
from kvboost.serve.schema import replies
from kvboost.serve.server import Caller, Server

router = Router(
    prefix="/kvboost/explain", tags=["explain"], route_class=BodyRoute, dependencies=[EACH_ONCE]
)


@router.endpoint("GET ", replies.ListOf[replies.AnswerSummary], 400)
async def list_answers(server: Server, caller: Caller) -> Response:
    """The answers of this key that can be explained, the oldest first."""
    data = [_head(one) for one in server.explanations.all(caller.owner)]
    return JSONResponse({"object": "list", "data": data})


@router.endpoint("GET /{answer_id}", replies.AnswerExplanation, 400, 404)
async def explain_answer(
    answer_id: Annotated[str, Path(min_length=1, max_length=512)], server: Server, caller: Caller
) -> Response:
    """Why each part of an answer's prompt was or was not reused. ``answer_id`` is the id of the
    answer: ``chatcmpl-...``, ``cmpl-...``, ``resp_...`` or ``msg_...``."""
    answered = server.explanations.get(caller.owner, answer_id)
    documents = server.documents.texts_of(caller.owner)

    settings = server.settings
    hides = settings.shared_cache and settings.needs_key and not caller.is_admin
    other_salts = not settings.needs_key  # with keys, they may be another tenant's

    def work() -> dict[str, Any]:
        explained = [one.explain(other_salts=other_salts) for one in answered.reports]
        if hides:  # the cached text may be another tenant's
            explained = [one.without_cached_text() for one in explained]
        named = [with_documents(one, documents).as_dict() for one in explained]
        return {**_head(answered), "explanations": named}

    size = sum(one.prompt_tokens for one in answered.reports)
    return JSONResponse(await server.workers.tokenize(caller.counts_as, size, work))


def _head(answered: Answered) -> dict[str, Any]:
    return {
        "id": answered.id,
        "object": "kvboost.explanation",
        "created": int(answered.created),
        "prompt_tokens": sum(one.prompt_tokens for one in answered.reports),
        "cached_tokens": sum(one.cached_tokens for one in answered.reports),
    }
