"""The noise floor of ``kvboost quality``: what 16-bit arithmetic alone does to the same answers."""

from __future__ import annotations

from typing import Any

from kvboost import GenerationMode, KVBoost
from kvboost.bench.quality.asked import MOST_BYTES, Asked, Comparison
from kvboost.bench.quality.rows import Row
from kvboost.config import EngineConfig
from kvboost.model.load import LoadedModel

NOISE = "noise"
NOISE_KINDS = ("bfloat16", "two shapes")
"""Full prefill in bfloat16 against float32; and in bfloat16 in slices against in one piece."""
WHOLE, SLICED = 1 << 20, 192


class NoiseFloor:
    """Full prefills of one model in bfloat16."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._whole, self._sliced = (
            KVBoost(
                loaded,
                EngineConfig(prefill_slice=rows, max_kv_bytes=MOST_BYTES, gpu_cache_bytes=0),
            )
            for rows in (WHOLE, SLICED)
        )

    def rows(self, asked: Asked) -> list[Row]:
        exact: dict[str, Any] = {"mode": GenerationMode.PREFIX_CACHE, "cache_salt": NOISE}
        whole, sliced = (
            engine.score(asked.prompt, asked.answer, **exact).logits
            for engine in (self._whole, self._sliced)
        )
        compared = (Comparison.of(asked.logits, whole), Comparison.of(whole, sliced))
        return [
            asked.row(
                engine,
                comparison,
                exact,
                donor=NOISE,
                strategy=kind,
                ratio=0.0,
                ttft_ratio=1.0,
                charged_share=1.0,
            )
            for kind, engine, comparison in zip(
                NOISE_KINDS, (self._whole, self._sliced), compared, strict=True
            )
        ]

    def close(self) -> None:
        self._whole.close()
        self._sliced.close()
