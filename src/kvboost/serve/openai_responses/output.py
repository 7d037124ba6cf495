"""The output of a response: its items, and the events of a stream of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from uuid import uuid4

from kvboost.serve.blocks import Block, BlockStep
from kvboost.serve.streaming import event

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
    number, status = uuid4().hex, "in_progress"
    match block.kind:
        case "reasoning":
            item = {"id": f"rs_{number}", "type": "reasoning", "status": status}
            return {**item, "summary": [], "content": []}
        case "content":
            item = {"id": f"msg_{number}", "type": "message", "status": status}
            return {**item, "role": "assistant", "content": []}
        case "call":
            item = {"id": f"fc_{number}", "type": "function_call", "status": status}
            return {
                **item,
                "call_id": f"call_{uuid4().hex[:24]}",
                "name": block.name,
                "arguments": "",
            }


def _part(kind: str, text: str) -> dict[str, Any]:
    part = {"type": _TEXT_PARTS[kind], "text": text}
    return part if kind == "reasoning" else {**part, "annotations": [], "logprobs": []}


def _logprobs(block: Block) -> dict[str, Any]:
    return {"logprobs": []} if block.kind == "content" else {}
