"""``/v1/completions``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from kvboost.serve.auth import Tenant
from kvboost.serve.bodies import BodyRoute
from kvboost.serve.choices import Choice, EngineCall
from kvboost.serve.logprobs import ShownToken, completion_logprobs
from kvboost.serve.openapi import errors, streamed
from kvboost.serve.request_models import CompletionRequest
from kvboost.serve.response_models import Completion
from kvboost.serve.responses import engine_call, respond, response_options
from kvboost.serve.reuse_report import Decode
from kvboost.serve.server import Caller, Server, ServerState

router = APIRouter(route_class=BodyRoute)

DEFAULT_MAX_TOKENS = 16  # OpenAI's


@router.post(
    "/v1/completions",
    response_model=Completion,
    responses={**streamed("text/event-stream"), **errors(404, 413, 429, 503, 504)},
    tags=["openai"],
)
async def create_completion(
    body: CompletionRequest, request: Request, server: Server, caller: Caller
) -> Response:
    """Continues one or several prompts, text or token ids, like OpenAI's API."""
    call = completion_call(server, caller, body)
    response_format = CompletionFormat(server.engine.decode if body.echo else None)
    return await respond(request, server, call, response_format, response_options(body))


def completion_call(server: ServerState, caller: Tenant, body: CompletionRequest) -> EngineCall:
    return engine_call(
        server,
        caller,
        body,
        body.prompts(),
        body.max_tokens or DEFAULT_MAX_TOKENS,
        body.logprobs,
    )


class CompletionFormat:
    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, echo: Decode | None) -> None:
        """With ``echo``, the text of an answer begins with its prompt."""
        self._echo = echo

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        return None if self._echo is None else _chunk(choice, self._prompt_text(choice))

    def piece(self, choice: Choice, text: str) -> list[dict[str, Any]]:
        return [_chunk(choice, text, choice.tokens_of(text))]

    def closing(self, choice: Choice) -> list[dict[str, Any]]:
        return [{**_chunk(choice, ""), "finish_reason": choice.result.finish_reason}]

    def whole(self, choice: Choice) -> dict[str, Any]:
        result = choice.result
        tokens = choice.tokens_of(result.output_text)
        whole = _chunk(choice, self._prompt_text(choice) + result.output_text, tokens)
        return {**whole, "finish_reason": result.finish_reason}

    def _prompt_text(self, choice: Choice) -> str:
        if self._echo is None:
            return ""
        prompt = choice.call.prompts[choice.index // choice.call.n]
        return prompt if isinstance(prompt, str) else self._echo(choice.prompt_ids)


def _chunk(choice: Choice, text: str, tokens: list[ShownToken] | None = None) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": text,
        "logprobs": None if tokens is None else completion_logprobs(tokens),
        "finish_reason": None,
    }
