"""KVBoost as it is here, over the same pipe as the other engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import kvboost
from kvboost import KVBoost


class Engine:
    def __init__(self, given: dict[str, Any]) -> None:
        torch.set_num_threads(given["threads"])
        self._engine = KVBoost.from_pretrained(
            given["folder"],
            max_cache_bytes=given["cache_bytes"],
            device=given["device"],
            dtype=given["dtype"],
        )
        self._mode = given["mode"]
        self.version = f"kvboost {kvboost.__version__}, torch {torch.__version__}"
        self.weights = given["dtype"]

    def generate(self, request: dict[str, Any], first: Callable[[], None]) -> dict[str, Any]:
        stream = self._engine.stream(
            request["ids"], request["max_tokens"], self._mode, ignore_eos=True
        )
        for _ in stream:
            first()
        result = stream.result
        return {"prompt_tokens": result.prompt_tokens, "cached_tokens": result.cached_tokens}
