"""The call of the engine that a request becomes, and one answer to it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

import kvboost
from kvboost.chat.calls import Part
from kvboost.chat.parser import AnswerParser
from kvboost.results import AppliedEdit, GenerationResult
from kvboost.serve.answers.logprobs import ShownToken, TokenReader
from kvboost.serve.answers.prompts import Kept, Prompt
from kvboost.serve.auth import Place
from kvboost.serve.errors import internal, shutting_down, timed_out
from kvboost.serve.schema.generation import Generation
from kvboost.tokens.hashing import TokenIds, as_token_ids

T = TypeVar("T")


@dataclass(frozen=True)
class EngineCall:
    """A checked request, and what it asks of the engine."""

    body: Generation
    prompts: Sequence[Prompt]
    options: dict[str, Any]
    """Options of the engine, by name."""
    place: Place
    format_field: str | None = None
    """The field that asks for a format."""
    documents: Sequence[str] = ()
    """The texts of documents in the prompt."""
    session: str | None = None
    """The conversation whose KV is pinned after the answer."""
    session_ttl: float | None = None
    kept: Kept = field(default_factory=Kept)
    """The beginnings of the prompt that are pinned after the answer."""
    suffix: str | None = None
    """The text after the answer, which fills in the middle."""
    applied_edits: Sequence[AppliedEdit] | None = None
    """The edits that changed the conversation; None if the request asks for none."""
    notes: Sequence[str] = ()
    """Notes for the client about its request."""
    size: int = 0
    """Characters that the prompts have, about."""

    @property
    def n(self) -> int:
        """The number of answers to each prompt."""
        return self.body.n or 1

    @property
    def mode(self) -> str:
        mode: str = self.options["mode"]
        return mode

    @property
    def adapter(self) -> str | None:
        return self.options.get("adapter")

    def edits_report(self) -> dict[str, Any]:
        """The field ``context_management`` of an answer, if the request has one."""
        if self.applied_edits is None:
            return {}
        applied = [edit.as_dict() for edit in self.applied_edits]
        return {"context_management": {"applied_edits": applied}}

    async def write(self, work: Callable[..., T], *arguments: Any) -> T:
        """The result of ``work``, which writes an answer or a large part of one; in a thread if it
        has log probabilities: each token has up to 20 alternatives to decode."""
        if any(self.options.get(name) is not None for name in ("logprobs", "prompt_logprobs")):
            return await asyncio.to_thread(work, *arguments)
        return work(*arguments)


@dataclass(eq=False)
class Choice:
    """One answer, while it runs and after."""

    index: int
    prompt_ids: TokenIds
    call: EngineCall
    stream: kvboost.AsyncTextStream
    received: float
    submitted: float = field(default_factory=time.perf_counter)
    parser: AnswerParser | None = None
    """Splits the answer into content, reasoning and calls of tools."""
    tokens: TokenReader | None = None
    """Finds the text of tokens, if the request asks for log probabilities."""
    ended: float | None = None
    _shown: int = 0

    def __post_init__(self) -> None:
        self.notes = list(self.call.notes)
        """Notes for the client besides the engine's own."""

    @property
    def result(self) -> GenerationResult:
        """The result so far."""
        if self.ended is None:
            return self.stream.result
        return self._last_result

    @cached_property
    def _last_result(self) -> GenerationResult:
        return self.stream.result

    @property
    def conversation_ids(self) -> TokenIds:
        """The prompt and the answer so far."""
        return np.concatenate([self.prompt_ids, as_token_ids(self.result.token_ids)])

    @property
    def ttft_ms(self) -> float:
        """Milliseconds from the complete body of the request to the first token."""
        return (self.submitted - self.received) * 1e3 + self.result.ttft_ms

    @property
    def total_ms(self) -> float:
        return ((self.ended or time.perf_counter()) - self.received) * 1e3

    @property
    def is_first(self) -> bool:
        """Whether it is the first of the answers to its prompt."""
        return self.index % self.call.n == 0

    @property
    def is_cut(self) -> bool:
        """Whether a limit has ended the answer."""
        return self.result.finish_reason == "length"

    @property
    def is_plain(self) -> bool:
        """Whether its pieces are text and nothing else."""
        return self.parser is None and self.tokens is None

    def tokens_of(self, piece: str) -> list[ShownToken] | None:
        """The tokens of the next ``piece``; None if no log probabilities are asked for."""
        if self.tokens is None:
            return None
        self._shown += len(piece)
        return self.tokens.take(self.result.logprobs or (), self._shown)

    def parts(self, piece: str) -> list[Part]:
        """The parts that ``piece``, the next piece of the answer, completes."""
        return [Part("content", piece)] if self.parser is None else self.parser.feed(piece)

    def all_parts(self) -> list[Part]:
        """The parts of the whole answer, none of which has been taken before."""
        return [*self.parts(self.result.output_text), *self.last_parts()]

    def last_parts(self) -> list[Part]:
        """The parts that were held back until the answer ended."""
        return [] if self.parser is None else self.parser.finish(cut=self.is_cut)

    def check(self, timeout: float | None) -> None:
        """Raises ApiError unless the answer ended normally."""
        match self.result.finish_reason:
            case "stop" | "length":
                return
            case "timeout":
                raise timed_out(timeout)
            case "cancelled":  # by the engine: we do not check answers that we cancel
                raise shutting_down()
            case _:
                raise internal()
