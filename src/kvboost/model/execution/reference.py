"""Stock transformers: the slow reference for every fast path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from kvboost.model.loading import load


class StockModel:
    """A model as transformers runs it: greedy, one sequence at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval()

    @classmethod
    def from_pretrained(
        cls,
        model_name: str | os.PathLike[str],
        *,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
    ) -> StockModel:
        """Accepts the same names as :meth:`KVBoost.from_pretrained`; loads the weights again."""
        model, _ = load.read(model_name, strict=False, device=device, dtype=dtype)
        return cls(model)

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int]) -> DynamicCache:
        """A cache that holds ``token_ids``."""
        cache = DynamicCache(config=self.model.config)
        cache.activate_past_recording()  # so that sliding windows can be rewound
        self.model(self._ids(token_ids), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    @torch.inference_mode()
    def next_token(self, token_ids: Sequence[int], cache: DynamicCache | None = None) -> int:
        """The token after ``token_ids``, which continue what ``cache`` holds, if given. The cache
        grows by them; ``rewind`` removes them."""
        ids = self._ids(token_ids)
        out = self.model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return int(out.logits[0, -1].argmax())

    @torch.inference_mode()
    def generate(
        self, token_ids: Sequence[int], max_new_tokens: int, cache: DynamicCache | None = None
    ) -> list[int]:
        """Continuation by ``model.generate``, exactly ``max_new_tokens`` long. ``cache``, if given,
        holds the beginning of ``token_ids`` and grows to all but the last new token."""
        ids = self._ids(token_ids)
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            max_new_tokens=max_new_tokens,
            min_new_tokens=max_new_tokens,
            do_sample=False,
        )
        return out[0, len(token_ids) :].tolist()

    @torch.inference_mode()
    def generate_batch(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        """Continuations of prompts of one length, exactly ``tokens`` long, in one batch."""
        ids = torch.tensor(prompts, device=self.model.device)
        exactly: dict[str, Any] = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, **exactly
        )
        return out[:, ids.shape[1] :].tolist()

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], last: int = 0) -> torch.Tensor:
        """Logits ``[tokens, vocab]`` of one full prefill; of the ``last`` rows, if given. How many
        rows the output head multiplies at once changes the last bits of float32 logits."""
        kept = {"logits_to_keep": last} if last else {}  # not every model knows this option
        return self.model(self._ids(token_ids), use_cache=False, **kept).logits[0]

    @staticmethod
    def rewind(cache: DynamicCache, num_tokens: int) -> None:
        """Removes the last ``num_tokens`` from ``cache``."""
        cache.crop(-num_tokens)

    def _ids(self, token_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(token_ids, device=self.model.device)[None]
