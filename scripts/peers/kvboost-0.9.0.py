"""kvboost 0.9.0 from PyPI, which has the name of ours: it only ever runs in its own environment.

It takes text, not token ids, and by itself loads weights as float16; here it gets the dtype that
everyone gets. Its ``on_token`` is called when the first token is there, before it stores anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import torch
import transformers

import kvboost


class Engine:
    def __init__(self, given: dict[str, Any]) -> None:
        if not str(kvboost.__file__).startswith(sys.prefix):
            raise RuntimeError(f"this is not the environment's own kvboost: {kvboost.__file__}")
        torch.set_num_threads(given["threads"])
        dtype = getattr(torch, given["dtype"])
        model = transformers.AutoModelForCausalLM.from_pretrained(given["folder"], dtype=dtype)
        tokenizer = transformers.AutoTokenizer.from_pretrained(given["folder"])
        make: Any = kvboost.KVBoost
        self._engine = make(
            model.eval(),
            tokenizer,
            max_cache_bytes=given["cache_bytes"],
            max_chunks=100_000,  # bytes are the limit, as for everyone
            device=given["device"],
        )
        self.version = f"kvboost {version('kvboost')}, transformers {transformers.__version__}"
        self.weights = given["dtype"]

    def generate(self, request: dict[str, Any], first: Callable[[], None]) -> dict[str, Any]:
        result = self._engine.generate(
            request["text"], request["max_tokens"], on_token=lambda _: first()
        )
        return {"prompt_tokens": result.prompt_tokens, "cached_tokens": result.cached_tokens}
