"""Stock transformers on the same weights: the slow reference every fast path is held against."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import DynamicCache, PreTrainedModel

from kvboost.model.forward import Forward


class StockModel:
    """The engine's model as transformers runs it by itself. While one of its calls runs, the
    engine must not: they share the weights and only one attention is bound at a time."""

    def __init__(self, forward: Forward, attention: str) -> None:
        self._forward = forward
        self._attention = attention

    @contextmanager
    def _unbound(self) -> Iterator[PreTrainedModel]:
        model = self._forward.model
        if self._forward.packed:
            model.set_attn_implementation(self._attention)
        try:
            with torch.inference_mode():
                yield model
        finally:
            self._forward.bind()

    def prefill(self, token_ids: Sequence[int]) -> DynamicCache:
        """A cache that holds ``token_ids``."""
        with self._unbound() as model:
            cache = DynamicCache(config=model.config)
            model(self._ids(token_ids), past_key_values=cache, use_cache=True, logits_to_keep=1)
        return cache

    def next_token(self, token_ids: Sequence[int], cache: DynamicCache | None = None) -> int:
        """The greedy token behind ``token_ids``, which continue what ``cache`` holds, if given.
        The cache is left as it was."""
        with self._unbound() as model:
            out = model(
                self._ids(token_ids), past_key_values=cache, use_cache=True, logits_to_keep=1
            )
            token = int(out.logits[0, -1].argmax())
            if cache is not None:
                cache.crop(-len(token_ids))
        return token

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits ``[tokens, vocab]`` of one full prefill."""
        with self._unbound() as model:
            return model(self._ids(token_ids), use_cache=False).logits[0]

    def generate(
        self, token_ids: Sequence[int], max_new_tokens: int, cache: DynamicCache | None = None
    ) -> list[int]:
        """Greedy continuation by ``model.generate``, exactly ``max_new_tokens`` long. ``cache``,
        if given, holds all of ``token_ids`` but the last and is used up."""
        with self._unbound() as model:
            ids = self._ids(token_ids)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=cache,
                max_new_tokens=max_new_tokens,
                min_new_tokens=max_new_tokens,
                do_sample=False,
            )
        return out[0, len(token_ids) :].tolist()

    def _ids(self, token_ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor(token_ids, device=self._forward.shape.device)[None]
