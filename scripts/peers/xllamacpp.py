"""llama.cpp's server without its port: one slot, older prompts kept in RAM, and shifting of runs of
tokens (``--cache-reuse``)."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import xllamacpp


class Engine:
    def __init__(self, given: dict[str, Any]) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = given["gguf"]
        params.n_parallel, params.n_ctx = 1, given["context"]
        params.kv_unified = True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = given["threads"]
        params.cache_prompt, params.n_cache_reuse = True, given["least_reused"]
        params.cache_ram_mib = given["cache_bytes"] // 1024**2
        self._server = xllamacpp.Server(params)
        self.version = f"xllamacpp {version('xllamacpp')}"
        self.weights = "as in the GGUF file"

    def generate(self, request: dict[str, Any], first: Callable[[], None]) -> dict[str, Any]:
        said: dict[str, Any] = {}

        def on_piece(piece: dict[str, Any]) -> bool:
            first()
            said.update(piece)
            return False  # go on

        self._server.handle_completions(
            {
                "prompt": request["ids"],
                "n_predict": request["max_tokens"],
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
            },
            on_piece,
        )
        if "usage" not in said:
            raise RuntimeError(f"llama.cpp answered {said}")
        usage = said["usage"]
        return {
            "prompt_tokens": usage["prompt_tokens"],
            "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        }
