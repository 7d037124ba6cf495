"""``/v1/completions``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fastapi import Request
from starlette.responses import Response

from kvboost.serve.answers.choices import Choice, EngineCall
from kvboost.serve.answers.logprobs import ShownToken, completion_logprobs, prompt_tokens
from kvboost.serve.answers.responses import ChoicesWriter, engine_call, respond
from kvboost.serve.auth import Tenant
from kvboost.serve.http.bodies import BodyRoute
from kvboost.serve.http.openapi import Router
from kvboost.serve.schema import replies
from kvboost.serve.schema.requests import CompletionRequest
from kvboost.serve.server import Caller, Server, ServerState

router = Router(route_class=BodyRoute, tags=["openai"])


@router.endpoint("POST /v1/completions", replies.Completion, streams=True)
async def create_completion(
    body: CompletionRequest, request: Request, server: Server, caller: Caller
) -> Response:
    """Continues one or several prompts, text or token ids, like OpenAI's API."""
    call = completion_call(server, caller, body)
    return await respond(request, server, call, CompletionWriter(server, call, body))


def completion_call(server: ServerState, caller: Tenant, body: CompletionRequest) -> EngineCall:
    return replace(engine_call(server, caller, body, body.prompts()), suffix=body.suffix)


class CompletionWriter(ChoicesWriter):
    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"
    has_one_prompt = False

    def __init__(self, server: ServerState, call: EngineCall, body: CompletionRequest) -> None:
        super().__init__(server, call)
        self._echo = server.engine.decode if body.echo else None
        """If given, the text of an answer begins with its prompt."""
        self._has_answer = call.body.longest_answer != 0
        self._has_logprobs = call.options.get("logprobs") is not None

    def opening(self, choice: Choice) -> dict[str, Any] | None:
        if self._echo is None:
            return None
        return _chunk(choice, self._prompt_text(choice), self._prompt_tokens(choice))

    def piece(self, choice: Choice, text: str) -> list[dict[str, Any]]:
        return [_chunk(choice, text, choice.tokens_of(text))] if self._has_answer else []

    def closing(self, choice: Choice) -> list[dict[str, Any]]:
        return [{**_chunk(choice, ""), "finish_reason": self._reason(choice)}]

    def complete(self, choice: Choice) -> dict[str, Any]:
        text = choice.result.output_text if self._has_answer else ""
        tokens = choice.tokens_of(text) if self._has_answer else [] if self._has_logprobs else None
        if tokens is not None and self._echo is not None:
            before = self._prompt_tokens(choice) or []
            length = len(self._prompt_text(choice))
            tokens = [*before, *(replace(one, offset=one.offset + length) for one in tokens)]
        whole = _chunk(choice, self._prompt_text(choice) + text, tokens)
        return {**whole, "finish_reason": self._reason(choice)}

    def _reason(self, choice: Choice) -> str:
        return choice.result.finish_reason if self._has_answer else "length"

    def _prompt_text(self, choice: Choice) -> str:
        if self._echo is None:
            return ""
        prompt = choice.call.prompts[choice.index // choice.call.n]
        return prompt if isinstance(prompt, str) else self._echo(choice.prompt_ids.tolist())

    def _prompt_tokens(self, choice: Choice) -> list[ShownToken] | None:
        if self._echo is None or not self._has_logprobs:
            return None
        return prompt_tokens(
            self._echo, choice.prompt_ids.tolist(), choice.result.prompt_logprobs or ()
        )


def _chunk(choice: Choice, text: str, tokens: list[ShownToken] | None = None) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": text,
        "logprobs": None if tokens is None else completion_logprobs(tokens),
        "finish_reason": None,
    }
