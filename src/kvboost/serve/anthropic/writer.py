"""Answers as messages of Anthropic's API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from typing import Any
from uuid import uuid4

from kvboost.serve.answers.answers import Answers, describe, keep_reports
from kvboost.serve.answers.blocks import Block, Blocks, BlockStep
from kvboost.serve.answers.choices import Choice
from kvboost.serve.anthropic.requests import MessagesRequest
from kvboost.serve.errors import ApiError, error_body
from kvboost.serve.http.streaming import event
from kvboost.serve.server import ServerState


class MessageWriter:
    """Writes one message."""

    def __init__(self, server: ServerState, body: MessagesRequest, request_id: str) -> None:
        self._server = server
        self._body = body
        self._request_id = request_id
        self._id = f"msg_{uuid4().hex}"
        self._blocks = Blocks()
        self._ids: dict[int, str] = {}
        """Of calls, by the index of their block."""

    async def whole(self, answers: Answers) -> dict[str, Any]:
        (choice,) = answers.choices
        for _ in (*self._blocks.feed(choice.all_parts()), *self._blocks.finish()):
            pass
        keep_reports(self._server, self._id, [choice])
        return {
            **self._message(choice),
            "content": [self._content(block) for block in self._blocks.blocks],
            **self._end(choice),
            "usage": self._usage(choice),
            **choice.call.edits_report(),
            "kvboost": await describe(self._server, choice),
        }

    async def events(self, answers: Answers) -> AsyncGenerator[bytes, None]:
        (choice,) = answers.choices
        yield _event("message_start", message=self._message(choice))
        yield _event("ping")
        async for _, piece in answers:
            if piece is not None:
                for one in self._written(self._blocks.feed(choice.parts(piece))):
                    yield one
        last = (*self._blocks.feed(choice.last_parts()), *self._blocks.finish())
        for one in self._written(last):
            yield one
        keep_reports(self._server, self._id, [choice])
        report = await describe(self._server, choice)
        yield _event(
            "message_delta",
            delta=self._end(choice),
            usage=self._usage(choice),
            **choice.call.edits_report(),
            kvboost=report,
        )
        yield _event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return event(error_body(error.status, error.message, self._request_id), "error")

    def _message(self, choice: Choice) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._body.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {**self._usage(choice), "output_tokens": 0},
        }

    def _written(self, steps: Iterable[BlockStep]) -> Iterator[bytes]:
        for step in steps:
            index = step.block.index
            match step.step:
                case "start":
                    block = self._content(Block(index, step.block.kind, step.block.name))
                    yield _event("content_block_start", index=index, content_block=block)
                case "delta":
                    delta = _delta(step.block, step.text)
                    yield _event("content_block_delta", index=index, delta=delta)
                case "stop":
                    yield _event("content_block_stop", index=index)

    def _content(self, block: Block) -> dict[str, Any]:
        match block.kind:
            case "content":
                return {"type": "text", "text": block.text}
            case "reasoning":
                return {"type": "thinking", "thinking": block.text, "signature": ""}
            case "call":
                call_id = self._ids.setdefault(block.index, f"toolu_{uuid4().hex[:24]}")
                named = {"id": call_id, "name": block.name}
                return {"type": "tool_use", **named, "input": block.arguments}

    def _end(self, choice: Choice) -> dict[str, Any]:
        """Why the message ended."""
        if choice.result.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if (found := self._stop_sequence(choice)) is not None:
            return {"stop_reason": "stop_sequence", "stop_sequence": found}
        has_calls = any(block.kind == "call" for block in self._blocks.blocks)
        return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}

    def _stop_sequence(self, choice: Choice) -> str | None:
        """The stop sequence that ended the answer: its tokens go on with it where its text ends."""
        stops, result = self._body.stop_sequences or (), choice.result
        if not stops:
            return None
        rest = self._server.engine.decode(result.token_ids)[len(result.output_text) :]
        return next((stop for stop in stops if rest.startswith(stop)), None)

    def _usage(self, choice: Choice) -> dict[str, int]:
        prompt, read = len(choice.prompt_ids), choice.result.cached_tokens
        created = max(0, choice.call.kept.num_tokens(choice.prompt_ids) - read)
        return {
            "input_tokens": prompt - read - created,
            "cache_creation_input_tokens": created,
            "cache_read_input_tokens": read,
            "output_tokens": len(choice.result.token_ids),
        }


def _event(kind: str, **fields: Any) -> bytes:
    return event({"type": kind, **fields}, kind)


def _delta(block: Block, text: str) -> dict[str, str]:
    match block.kind:
        case "content":
            return {"type": "text_delta", "text": text}
        case "reasoning":
            return {"type": "thinking_delta", "thinking": text}
        case "call":
            return {"type": "input_json_delta", "partial_json": text}
