"""Requests that no engine has made, or that none runs."""

from __future__ import annotations

from typing import Any

from kvboost import KVBoost
from kvboost.config import GenerationMode, RepairParams, SamplingParams
from kvboost.runtime.request import Request, RequestState
from kvboost.tokens.hashing import as_token_ids


def request_of(
    token_ids: Any,
    mode: GenerationMode = GenerationMode.PREFIX_CACHE,
    params: SamplingParams | None = None,
    **options: Any,
) -> Request:
    ids = as_token_ids(token_ids)
    return Request(ids, mode, "", params or SamplingParams(), RepairParams(), **options)


def begin(
    engine: KVBoost, prompt: Any, tokens: int = 1, mode: str = "baseline", **options: Any
) -> RequestState:
    """A request of an engine that has not run yet."""
    return engine._requests.begin(prompt, tokens, mode, options)  # type: ignore[arg-type]


class NoListener:
    """Whoever waits for an answer, and is not told of it."""

    def push(self, pieces: list[str]) -> None: ...
    def end(self, error: BaseException | None) -> None: ...
