"""Answers as lines of Ollama's API."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any
from uuid import uuid4

from kvboost.serve.answers.answers import Answers, describe
from kvboost.serve.answers.blocks import Block, Blocks, BlockStep
from kvboost.serve.answers.choices import Choice
from kvboost.serve.answers.logprobs import ShownToken, chat_logprobs
from kvboost.serve.errors import ApiError
from kvboost.serve.http.streaming import line
from kvboost.serve.server import ServerState


class OllamaWriter:
    """Writes one answer: a message of chat, or a response of generate."""

    def __init__(self, server: ServerState, model: str, *, is_chat: bool) -> None:
        """``model``: its name as the request has it."""
        self._server = server
        self._model = model
        self._is_chat = is_chat
        self._blocks = Blocks()
        self._num_calls = 0
        self._tokens: list[ShownToken] = []
        """Tokens whose log probabilities have not been written."""

    async def whole(self, answers: Answers) -> dict[str, Any]:
        (choice,) = answers.choices
        said = await choice.call.write(self._whole, choice)
        return {**said, **await self._end(choice)}

    async def events(self, answers: Answers) -> AsyncGenerator[bytes, None]:
        (choice,) = answers.choices
        async for _, piece in answers:
            if piece is not None:
                for one in self._written(self._feed(choice, piece), choice):
                    yield line(one)
        for one in self._written(self._finish(choice), choice):
            yield line(one)
        yield line({**self._said(), **await self._end(choice)})

    def failure(self, error: ApiError) -> bytes:
        return line({"error": error.message})

    def loaded(self) -> dict[str, Any]:
        """The answer to a request that asks nothing: the model is loaded."""
        return {**self._said(), "done": True, "done_reason": "load"}

    def _whole(self, choice: Choice) -> dict[str, Any]:
        calls = []
        for step in (*self._feed(choice, choice.result.output_text), *self._finish(choice)):
            if step.step == "stop" and _is_call(step.block, choice):
                calls.append(self._call(step.block))
        texts = self._blocks.text_of("content"), self._blocks.text_of("reasoning")
        return self._said(*texts, calls)

    def _feed(self, choice: Choice, piece: str) -> Iterator[BlockStep]:
        self._tokens += choice.tokens_of(piece) or ()
        return self._blocks.feed(choice.parts(piece))

    def _finish(self, choice: Choice) -> Iterator[BlockStep]:
        yield from self._blocks.feed(choice.last_parts())
        yield from self._blocks.finish()

    def _written(self, steps: Iterable[BlockStep], choice: Choice) -> Iterator[dict[str, Any]]:
        """The objects of a stream. A call is written when it is complete."""
        for step in steps:
            match step.step, step.block.kind:
                case "delta", "content":
                    yield self._said(step.text)
                case "delta", "reasoning":
                    yield self._said(thinking=step.text)
                case "stop", "call" if _is_call(step.block, choice):
                    yield self._said(calls=[self._call(step.block)])

    def _said(
        self, content: str = "", thinking: str = "", calls: Iterable[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        head = {"model": self._model, "created_at": timestamp(datetime.now(UTC))}
        thought = {"thinking": thinking} if thinking else {}
        if self._is_chat:
            called = {"tool_calls": list(calls)} if calls else {}
            said: dict[str, Any] = {
                "message": {"role": "assistant", "content": content, **thought, **called}
            }
        else:
            said = {"response": content, **thought}
        if self._tokens:
            said["logprobs"] = chat_logprobs(self._tokens)["content"]
            self._tokens = []
        return {**head, **said, "done": False}

    def _call(self, block: Block) -> dict[str, Any]:
        function = {"index": self._num_calls, "name": block.name, "arguments": block.arguments}
        self._num_calls += 1
        return {"id": f"call_{uuid4().hex[:24]}", "function": function}

    async def _end(self, choice: Choice) -> dict[str, Any]:
        """The fields of the last object. Durations are in nanoseconds, and add up."""
        result = choice.result
        queue_ms = result.timings.queue_ms
        return {
            "done": True,
            "done_reason": result.finish_reason,
            "total_duration": _ns(choice.total_ms),
            "load_duration": _ns(queue_ms),
            "prompt_eval_count": len(choice.prompt_ids),
            "prompt_eval_duration": _ns(choice.ttft_ms - queue_ms),
            "eval_count": len(result.token_ids),
            "eval_duration": _ns(choice.total_ms - choice.ttft_ms),
            "kvboost": await describe(self._server, choice),
        }


def timestamp(moment: datetime) -> str:
    return moment.isoformat().replace("+00:00", "Z")


def _is_call(block: Block, choice: Choice) -> bool:
    """Whether ``block`` is a call to make: not one whose arguments were cut off."""
    return block.kind == "call" and bool(block.arguments or not choice.is_cut)


def _ns(milliseconds: float) -> int:
    """Clients divide by durations, so none is 0."""
    return max(1, round(milliseconds * 1e6))
