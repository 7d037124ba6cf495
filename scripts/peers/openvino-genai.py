"""OpenVINO GenAI on the GGUF file, with prefix caching."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import numpy as np
import openvino
import openvino_genai


class Engine:
    def __init__(self, given: dict[str, Any]) -> None:
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.enable_prefix_caching = True
        scheduling.cache_size = max(1, given["cache_bytes"] // 1024**3)
        scheduling.max_num_batched_tokens = given["context"]
        self._pipeline = openvino_genai.LLMPipeline(
            given["gguf"],
            "CPU",
            scheduler_config=scheduling,
            INFERENCE_NUM_THREADS=given["threads"],
        )
        self.version = f"openvino-genai {version('openvino-genai')}"
        self.weights = "as in the GGUF file"

    def generate(self, request: dict[str, Any], first: Callable[[], None]) -> dict[str, Any]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = request["max_tokens"]
        config.ignore_eos, config.do_sample = True, False
        ids = np.array([request["ids"]], dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        )
        self._pipeline.generate(inputs, config, _Tokens(first))
        return {"prompt_tokens": len(request["ids"]), "cached_tokens": None}


class _Tokens(openvino_genai.StreamerBase):
    """Sees token ids: text is held back until it is sure, which is some tokens later."""

    def __init__(self, first: Callable[[], None]) -> None:
        super().__init__()
        self._first = first

    def write(self, token: int | list[int]) -> Any:
        self._first()
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None:
        pass
