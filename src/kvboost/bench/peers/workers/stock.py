"""Stock transformers, which keeps nothing from one call to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers


class Engine:
    def __init__(self, given: dict[str, Any]) -> None:
        torch.set_num_threads(given["threads"])
        dtype = getattr(torch, given["dtype"])
        model = transformers.AutoModelForCausalLM.from_pretrained(given["folder"], dtype=dtype)
        self._model = model.to(given["device"]).eval()
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self.weights = given["dtype"]

    @torch.inference_mode()
    def generate(self, request: dict[str, Any], first: Callable[[], None]) -> dict[str, Any]:
        ids, cache = torch.tensor([request["ids"]], device=self._model.device), None
        for _ in range(request["max_tokens"]):
            out = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token, cache = int(out.logits[0, -1].argmax()), out.past_key_values
            first()
            ids = ids.new_tensor([[token]])
        return {"prompt_tokens": len(request["ids"]), "cached_tokens": 0}
