"""One request on its way: what was asked, how far it is, and the stream its caller holds."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING

from kvboost.config import GenerationMode, RepairParams, SamplingParams
from kvboost.results import Clock, GenerationResult, ReuseReport, TokenLogprob
from kvboost.tokens.hashing import TokenIds

if TYPE_CHECKING:
    import torch
    from typing_extensions import Self


@dataclass(frozen=True)
class Request:
    """What was asked, checked."""

    token_ids: TokenIds
    mode: GenerationMode
    salt: str
    params: SamplingParams
    repair: RepairParams
    keep: bool = True
    """Whether what it computes is kept for later requests."""
    boundaries: tuple[int, ...] = ()
    """Tokens with which a new document begins: no chunk goes across."""


@dataclass
class Run:
    """How far a request is."""

    clock: Clock
    reuse: ReuseReport = field(default_factory=lambda: ReuseReport(()))
    rows: int = 0
    """Rows of the request's KV that are in place."""
    epoch: int = 0
    """Of the store, when the request was planned."""
    exact_rows: int = sys.maxsize
    """Rows before the first that is approximate or moved."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish_reason: str = "cancelled"
    closing: bool = False
    """The caller closes the stream, rather than the garbage collector finding it."""
    kept: bool = True
    """Whether the rows may be kept for later requests."""
    new_chunks: int = 0
    """How many chunks were kept of it."""
    batched: bool = False
    """Other requests run beside it, and may share what it reads."""
    accompanied: bool = False
    """Others have run beside it: its times say nothing of what forwards cost."""
    slice_rows: int | None = None
    """At most so many rows of its prompt go through the model at a time; by default what suits
    the device."""
    record: bool = False
    """Whether to keep the logits of the first tokens over moved text, for an audit."""
    recorded: list[torch.Tensor] = field(default_factory=list)

    def accept(self, token_id: int, logprob: TokenLogprob | None) -> None:
        self.token_ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)

    def show(self, piece: str) -> None:
        if piece:
            self.text.append(piece)

    def result(self, with_logprobs: bool) -> GenerationResult:
        return GenerationResult(
            output_text="".join(self.text),
            token_ids=list(self.token_ids),
            finish_reason=self.finish_reason,
            timings=self.clock.timings(),
            reuse=self.reuse,
            logprobs=list(self.logprobs) if with_logprobs else None,
        )


class TextStream:
    """An iterator of text pieces. ``result`` is complete once the stream is exhausted or closed;
    closing it early keeps what was read and gives ``finish_reason="cancelled"``. The time its
    caller spends between two pieces is not counted."""

    def __init__(self, pieces: Generator[str, None, None], run: Run, request: Request) -> None:
        self._pieces = pieces
        self._run = run
        self._request = request
        self._left_at = time.perf_counter()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        self._run.clock.leave_out(time.perf_counter() - self._left_at)
        try:
            return next(self._pieces)
        finally:
            self._left_at = time.perf_counter()

    @property
    def result(self) -> GenerationResult:
        """What there is so far."""
        return self._run.result(with_logprobs=self._request.params.logprobs is not None)

    def close(self) -> None:
        self._run.clock.leave_out(time.perf_counter() - self._left_at)
        self._run.closing = True
        self._pieces.close()
        self._left_at = time.perf_counter()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
