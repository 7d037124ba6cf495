"""The parts of an answer as consecutive blocks: reasoning, text, calls of tools."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kvboost.chat.calls import Part
from kvboost.serve.http.json_text import JsonTextError, parse_json


@dataclass
class Block:
    index: int
    kind: Literal["reasoning", "content", "call"]
    name: str = ""
    """Of a call: the tool."""
    text: str = ""
    """Of a call: the JSON text of its arguments."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Of a call; none if they are not a JSON object, as in a call that was cut off."""
        try:
            value = parse_json((self.text or "{}").encode())
        except JsonTextError:
            return {}
        return value if isinstance(value, dict) else {}


class BlockStep(NamedTuple):
    """A block begins, gets more text, or ends."""

    step: Literal["start", "delta", "stop"]
    block: Block
    text: str = ""


class Blocks:
    """Puts the parts of one answer together, and says step by step what changes."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self._open: Block | None = None

    def feed(self, parts: Iterable[Part]) -> Iterator[BlockStep]:
        for part in parts:
            text = part.text
            if part.kind == "call":
                yield from self._begin("call", part.text)
                continue
            if part.kind != "arguments" and (self._open is None or self._open.kind != part.kind):
                yield from self._begin(part.kind)
                text = text.lstrip("\n") if len(self.blocks) > 1 else text
            assert self._open is not None
            self._open.text += text
            if text:
                yield BlockStep("delta", self._open, text)

    def finish(self, *, never_empty: bool = False) -> Iterator[BlockStep]:
        """Ends the last block. With ``never_empty``, an answer without any gets an empty one."""
        if never_empty and not self.blocks:
            yield from self._begin("content")
        yield from self._end()

    def text_of(self, kind: str) -> str:
        """The text of all blocks of ``kind``."""
        return "".join(block.text for block in self.blocks if block.kind == kind)

    def _begin(
        self, kind: Literal["reasoning", "content", "call"], name: str = ""
    ) -> Iterator[BlockStep]:
        yield from self._end()
        self._open = Block(len(self.blocks), kind, name)
        self.blocks.append(self._open)
        yield BlockStep("start", self._open)

    def _end(self) -> Iterator[BlockStep]:
        if self._open is not None:
            block, self._open = self._open, None
            yield BlockStep("stop", block)
