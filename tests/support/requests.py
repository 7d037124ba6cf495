"""Requests that no engine has made."""

from __future__ import annotations

from typing import Any

from kvboost.config import GenerationMode, RepairParams, SamplingParams
from kvboost.runtime.request import Request
from kvboost.tokens.hashing import as_token_ids


def request_of(
    token_ids: Any,
    mode: GenerationMode = GenerationMode.PREFIX_CACHE,
    params: SamplingParams | None = None,
    **options: Any,
) -> Request:
    ids = as_token_ids(token_ids)
    return Request(ids, mode, "", params or SamplingParams(), RepairParams(), **options)


class NoListener:
    """Whoever waits for an answer, and is not told of it."""

    def push(self, pieces: list[str]) -> None: ...
    def end(self, error: BaseException | None) -> None: ...
