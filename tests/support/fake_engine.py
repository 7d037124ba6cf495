"""An engine without a model, for what a real one seldom does: full queues, failures, hanging."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from kvboost.chat.parser import AnswerParser, TextParser
from kvboost.chat.styles import TAGGED
from kvboost.chat.tool_use import ToolUse
from kvboost.errors import PinError, PromptError, UnknownAdapterError
from kvboost.results import (
    PHASES,
    Explanation,
    GenerationResult,
    Pin,
    ReuseReport,
    Span,
    SpanKind,
    Timings,
    TokenLogprob,
)
from kvboost.runtime.streams import AnswerReader
from kvboost.tokens.hashing import as_token_ids
from kvboost.tokens.images import ReadPrompt
from kvboost.tokens.prompt import Conversation


def unexplained(report: ReuseReport, other_salts: bool) -> Explanation:
    return Explanation((), None, report.notes, ())


class FakeStream:
    """Says ``pieces``, one token each; ``None`` among them waits for ever, an exception ends the
    answer. A tuple of pieces arrives at once."""

    def __init__(self, prompt_ids: list[int], pieces: Sequence[Any], finish_reason: str) -> None:
        self._prompt_ids = prompt_ids
        self._pieces = list(pieces)
        self._finish_reason = finish_reason
        self._said: list[str] = []
        self.is_open = True
        self._ended = "cancelled"

    @property
    def num_tokens(self) -> int:
        return len(self._said)

    @property
    def num_rows(self) -> int:
        return 0

    async def __aenter__(self) -> FakeStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.is_open = False

    def read_by(self, reader: AnswerReader) -> None:
        asyncio.get_running_loop().call_soon(self._say_next, reader)

    def _say_next(self, reader: AnswerReader) -> None:
        if not self.is_open:
            return
        if not self._pieces:
            self._ended = self._finish_reason
            reader.end(None)
            return
        piece = self._pieces.pop(0)
        if isinstance(piece, BaseException):
            self._ended = "error"
            reader.end(piece)
        elif piece is not None:
            together = list(piece) if isinstance(piece, tuple) else [piece]
            self._said += together
            reader.push(together)
            self.read_by(reader)

    @property
    def result(self) -> GenerationResult:
        phases = {f"{phase}_ms": 0.0 for phase in PHASES}
        span = Span(SpanKind.COMPUTE, 0, len(self._prompt_ids))
        return GenerationResult(
            "".join(self._said),
            list(range(len(self._said))),
            self._ended,
            Timings(ttft_ms=1.0, total_ms=2.0, **phases),
            ReuseReport((span,), explainer=unexplained),
            [TokenLogprob(number, -0.5) for number in range(len(self._said))],
        )


class FakeEngine:
    """Answers every prompt with ``pieces``; keeps what it was asked."""

    model_name = "fake"
    context_length: int | None = 100
    vocab_size = 260
    embedder = SimpleNamespace(dimensions=64)
    config = SimpleNamespace(
        recompute_strategy="auto", chunking="fixed", max_waiting=9, max_running=9
    )

    def __init__(self, pieces: Sequence[Any] = ("Hel", "lo"), finish_reason: str = "stop") -> None:
        self.pieces = pieces
        self.finish_reason = finish_reason
        self.refuse: Exception | None = None
        self.failure: Exception | None = None
        self.asked: list[dict[str, Any]] = []
        self.streams: list[FakeStream] = []
        self.drained = self.flushed = False
        self.thinks = self.fills_in = False
        self.loop_cpu_seconds = 2.5
        self.conversations: list[Conversation] = []
        self.uses: list[ToolUse] = []
        self.loaded: dict[str, Any] = {}
        self.pinned: dict[str, Pin] = {}
        self.pinned_ids: dict[str, list[int]] = {}
        self.most_pinned = 1000

    image_reader = "this model cannot be given images"

    def facts(self) -> dict[str, Any]:
        return {"architecture": "Fake", "device": "cpu"}

    def render(self, conversation: Conversation) -> str:
        self.conversations.append(conversation)
        return "".join(f"{one['role']}:{one['content']}" for one in conversation.messages)

    def encode(self, prompt: Any, *, add_special_tokens: bool = True) -> list[int]:
        return list(prompt.encode() if isinstance(prompt, str) else prompt)

    def read(self, prompt: Any, *, add_special_tokens: bool = True) -> ReadPrompt:
        return ReadPrompt(as_token_ids(self.encode(prompt)))

    def infill(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        if not self.fills_in:
            raise PromptError("this model cannot fill in the middle")
        return [*before, 0, *after]

    def answer_options(
        self, prompt_ids: list[int], use: ToolUse, options: dict[str, Any]
    ) -> dict[str, Any]:
        self.uses.append(use)
        return options

    def answer_meanwhile(self) -> None:
        pass

    def prepare_formats(self) -> None:
        pass

    def compile_format(self, options: dict[str, Any]) -> None:
        pass

    def answer_parser(self, prompt_ids: list[int], use: ToolUse) -> AnswerParser | None:
        if not use.offered and not self.thinks:
            return None
        return TextParser(TAGGED if use.offered else None, thinks=self.thinks)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(one % 256 for one in ids).decode("utf-8", "replace")

    def astream(
        self, prompt: ReadPrompt, max_new_tokens: int, mode: str, **options: Any
    ) -> FakeStream:
        ids = prompt.token_ids.tolist()
        self.asked.append({"prompt": ids, "max": max_new_tokens, "mode": mode, **options})
        if self.refuse is not None:
            raise self.refuse
        stream = FakeStream(ids, self.pieces, self.finish_reason)
        self.streams.append(stream)
        return stream

    async def awarm(self, text: str, header: str | None = None, cache_salt: str = "") -> int:
        if self.refuse is not None:
            raise self.refuse
        self.asked.append({"warm": text, "header": header, "cache_salt": cache_salt})
        return 1

    def warm_later(
        self,
        documents: Sequence[str],
        header: str | None = None,
        *,
        contexts: int = 4,
        cache_salt: str = "",
    ) -> int:
        if self.refuse is not None:
            raise self.refuse
        asked = {"warm_later": [*documents], "header": header, "contexts": contexts}
        self.asked.append({**asked, "cache_salt": cache_salt})
        return len(documents) * (min(contexts, len(documents)) - 1)

    async def apin(
        self,
        text: Any,
        header: str | None = None,
        *,
        ttl: float | None = None,
        cache_salt: str = "",
    ) -> Pin:
        if self.refuse is not None:
            raise self.refuse
        asked = {"pin": text, "header": header, "ttl": ttl, "cache_salt": cache_salt}
        self.asked.append(asked)
        return self.pin_cached("text-1", self.encode(text), ttl=ttl)

    def pin_cached(
        self,
        name: str,
        ids: Sequence[int],
        *,
        ttl: float | None = None,
        cache_salt: str = "",
        adapter: str | None = None,
    ) -> Pin:
        if self.refuse is not None:
            raise self.refuse
        if name not in self.pinned and len(self.pinned) == self.most_pinned:
            raise PinError("full")
        self.pinned_ids[name] = list(map(int, ids))
        self.pinned[name] = Pin(name, len(ids), 1, 8 * len(ids), ttl)
        return self.pinned[name]

    def unpin(self, text: str, *, cache_salt: str = "") -> Pin | None:
        return self.drop_pin("text-1")

    def drop_pin(self, name: str) -> Pin | None:
        self.pinned_ids.pop(name, None)
        return self.pinned.pop(name, None)

    def pins(self) -> list[Pin]:
        return list(self.pinned.values())

    def plan(self, prompt: list[int], mode: str, **options: Any) -> ReuseReport:
        return ReuseReport((Span(SpanKind.COMPUTE, 0, len(prompt)),), explainer=unexplained)

    def estimate_ms(self, num_tokens: int) -> float | None:
        return None

    def forget(self, text: str) -> int:
        return 2

    def forget_salt(self, salt: str) -> int:
        self.asked.append({"forget_salt": salt})
        return 3

    def adapters(self) -> dict[str, Any]:
        return self.loaded

    def load_adapter(self, name: str, path: str, *, in_place: bool = False) -> None:
        self.asked.append({"load": name, "path": path, "in_place": in_place})
        if self.refuse is not None:
            raise self.refuse
        self.loaded[name] = SimpleNamespace(digest="d1", rank=4)

    def unload_adapter(self, name: str) -> None:
        if name not in self.loaded:
            raise UnknownAdapterError(f"there is no adapter {name!r}")
        del self.loaded[name]

    def chunks(self, limit: int) -> list[dict[str, Any]]:
        return []

    def cache_stats(self) -> dict[str, Any]:
        names = ("chunks", "evicted", "demoted", "promoted", "rejected", "failed", "lost")
        drafts = {"drafted_tokens": 40, "accepted_tokens": 30}
        healing = ("waiting", "approximate_tokens", "healed_tokens", "computed_tokens", "seconds")
        ended = ("healed", "replaced", "dropped", "failed")
        readings = ("readings", "readings_waiting", "readings_dropped")
        audit = {"audited": 0, "mean_kl": None, "max_kl": None, "token_agreement": None}
        return {
            "tiers": {},
            **drafts,
            "pinned_bytes": sum(pin.bytes for pin in self.pinned.values()),
            "max_pinned_bytes": 1000,
            **dict.fromkeys(names, 0),
            "healing": dict.fromkeys((*healing, *ended, *readings), 0),
            "audit": {**audit, "recompute_ratio": 0.15},
        }

    def serving_stats(self) -> dict[str, Any]:
        names = ("waiting", "running", "max_waiting", "max_running", "kv_bytes", "max_kv_bytes")
        totals = {"batch_sizes": {1: 3, 4: 2}, "rejected": 5, "steps": 5}
        totals["cpu_seconds"] = self.loop_cpu_seconds
        return {**dict.fromkeys(names, 9), **totals}

    async def adrain(self, timeout: float) -> None:
        self.drained = True

    def flush(self) -> None:
        self.flushed = True


class ReadsForever(FakeEngine):
    """Never ends reading a document."""

    async def awarm(self, text: str, header: str | None = None, cache_salt: str = "") -> int:
        return await asyncio.Future()
