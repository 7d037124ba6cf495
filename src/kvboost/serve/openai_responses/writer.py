"""Answers as responses of the Responses API: their items, and the events of a stream of them."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from typing import Any
from uuid import uuid4

from pydantic import BaseModel

from kvboost.serve.answers.answers import Answers, describe, keep_reports
from kvboost.serve.answers.blocks import Block, Blocks, BlockStep
from kvboost.serve.answers.choices import Choice
from kvboost.serve.errors import ApiError
from kvboost.serve.http.streaming import event
from kvboost.serve.openai_responses.items import messages_of_output
from kvboost.serve.openai_responses.requests import ResponseRequest
from kvboost.serve.openai_responses.store import StoredResponse, stored_size
from kvboost.serve.schema.chat import Message
from kvboost.serve.server import ServerState

_TEXT_PARTS = {"content": "output_text", "reasoning": "reasoning_text"}


class Output:
    """Makes items and events of the blocks of an answer."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._sequence = 0

    def event(self, name: str, /, **fields: Any) -> bytes:
        """One event of the stream, numbered."""
        number, self._sequence = self._sequence, self._sequence + 1
        return event({"type": name, "sequence_number": number, **fields}, name)

    def response_event(self, name: str, response: Mapping[str, Any]) -> bytes:
        return self.event(f"response.{name}", response=response)

    def write(self, steps: Iterable[BlockStep], status: str = "completed") -> Iterator[bytes]:
        """The events of ``steps``. An item that ends gets ``status``."""
        for step in steps:
            match step.step:
                case "start":
                    yield from self._start(step.block)
                case "delta":
                    yield self._delta(step.block, step.text)
                case "stop":
                    yield from self._stop(step.block, status)

    def _start(self, block: Block) -> Iterator[bytes]:
        item = _new_item(block)
        self.items.append(item)
        yield self.event("response.output_item.added", output_index=block.index, item=item)
        if block.kind != "call":
            part = _part(block.kind, "")
            yield self._about("response.content_part.added", block, content_index=0, part=part)

    def _delta(self, block: Block, text: str) -> bytes:
        if block.kind == "call":
            return self._about("response.function_call_arguments.delta", block, delta=text)
        name = f"response.{_TEXT_PARTS[block.kind]}.delta"
        return self._about(name, block, content_index=0, delta=text, **_logprobs(block))

    def _stop(self, block: Block, status: str) -> Iterator[bytes]:
        item = self.items[block.index]
        item["status"] = status
        if block.kind == "call":
            item["arguments"] = block.text
            said = {"name": block.name, "arguments": block.text}
            yield self._about("response.function_call_arguments.done", block, **said)
        else:
            part = _part(block.kind, block.text)
            item["content"] = [part]
            name = f"response.{_TEXT_PARTS[block.kind]}.done"
            yield self._about(name, block, content_index=0, text=block.text, **_logprobs(block))
            yield self._about("response.content_part.done", block, content_index=0, part=part)
        yield self.event("response.output_item.done", output_index=block.index, item=item)

    def _about(self, name: str, block: Block, /, **fields: Any) -> bytes:
        item_id = self.items[block.index]["id"]
        return self.event(name, item_id=item_id, output_index=block.index, **fields)


def _new_item(block: Block) -> dict[str, Any]:
    more: dict[str, Any]
    match block.kind:
        case "reasoning":
            prefix, kind, more = "rs", "reasoning", {"summary": [], "content": []}
        case "content":
            prefix, kind, more = "msg", "message", {"role": "assistant", "content": []}
        case "call":
            prefix, kind, more = "fc", "function_call", {"call_id": f"call_{uuid4().hex[:24]}"}
            more |= {"name": block.name, "arguments": ""}
    return {"id": f"{prefix}_{uuid4().hex}", "type": kind, "status": "in_progress", **more}


def _part(kind: str, text: str) -> dict[str, Any]:
    part = {"type": _TEXT_PARTS[kind], "text": text}
    return part if kind == "reasoning" else {**part, "annotations": [], "logprobs": []}


def _logprobs(block: Block) -> dict[str, Any]:
    return {"logprobs": []} if block.kind == "content" else {}


class ResponseWriter:
    """Writes one response, and keeps it unless the request says otherwise."""

    def __init__(
        self, server: ServerState, tenant: str, body: ResponseRequest, messages: Sequence[Message]
    ) -> None:
        """``messages``: the conversation that is answered, without instructions."""
        self._server = server
        self._tenant = tenant
        self._messages = messages
        self._stores = body.store is not False
        self._response = new_response(body)
        self._blocks = Blocks()
        self._output = Output()

    async def whole(self, answers: Answers) -> dict[str, Any]:
        (choice,) = answers.choices
        for _ in self._output.write(self._blocks.feed(choice.all_parts())):
            pass
        for _ in self._output.write(self._blocks.finish(never_empty=True), _status(choice)):
            pass
        return await self._finish(choice)

    async def events(self, answers: Answers) -> AsyncGenerator[bytes, None]:
        output, blocks = self._output, self._blocks
        yield output.response_event("created", self._response)
        yield output.response_event("in_progress", self._response)
        async for choice, piece in answers:
            if piece is not None:
                for one in output.write(blocks.feed(choice.parts(piece))):
                    yield one
                continue
            for one in output.write(blocks.feed(choice.last_parts())):
                yield one
            for one in output.write(blocks.finish(never_empty=True), _status(choice)):
                yield one
            yield output.response_event(_status(choice), await self._finish(choice))

    def failure(self, error: ApiError) -> bytes:
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        said = {"code": code, "message": error.message}
        failed = {**self._response, "status": "failed", "error": said}
        return self._output.response_event("failed", {**failed, "output": self._output.items})

    async def _finish(self, choice: Choice) -> dict[str, Any]:
        """The complete response, after it has been stored."""
        status = _status(choice)
        response = {
            **self._response,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "output": self._output.items,
            "usage": await self._usage(choice),
            "kvboost": await describe(self._server, choice),
        }
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        keep_reports(self._server, response["id"], [choice])
        if self._stores:
            self._store(choice, response)
        return response

    def _store(self, choice: Choice, response: dict[str, Any]) -> None:
        messages = [*self._messages, *messages_of_output(response["output"])]
        size = stored_size(response, messages)
        stored = StoredResponse(response, tuple(messages), len(self._messages), size)
        self._server.stored_responses.add(self._tenant, stored)
        ids = choice.conversation_ids
        seconds = self._server.settings.stored_response_seconds
        call = choice.call
        self._server.kept_kv.keep(response["id"], ids, call.place, seconds, call.adapter)

    async def _usage(self, choice: Choice) -> dict[str, Any]:
        engine, result = self._server.engine, choice.result
        prompt, answer = len(choice.prompt_ids), len(result.token_ids)
        reasoning = self._blocks.text_of("reasoning")
        thought = 0
        if reasoning:
            ids = await self._server.workers.tokenize(
                choice.call.options["tenant"], len(reasoning), engine.encode, reasoning
            )
            thought = min(answer, len(ids))
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": result.cached_tokens,
                "exact_tokens": result.exact_tokens,
                "cache_write_tokens": prompt - result.cached_tokens,
            },
            "output_tokens": answer,
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": prompt + answer,
        }


_REPEATED = ("instructions", "max_output_tokens", "model", "previous_response_id", "top_p", "user")


def new_response(body: ResponseRequest) -> dict[str, Any]:
    """The response to ``body`` before it has any output."""
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
    choice = body.tool_choice
    return {
        "id": f"resp_{uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        **dict.fromkeys(("completed_at", "error", "incomplete_details", "usage")),
        **{name: getattr(body, name) for name in _REPEATED},
        "background": False,
        "metadata": body.metadata or {},
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": choice.model_dump() if isinstance(choice, BaseModel) else choice or "auto",
        "tools": [tool.model_dump(exclude_unset=True) for tool in body.tools or ()],
        "truncation": body.truncation or "disabled",
    }


def _status(choice: Choice) -> str:
    return "incomplete" if choice.result.finish_reason == "length" else "completed"
