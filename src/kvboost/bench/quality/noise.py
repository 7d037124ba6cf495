"""The noise floor of ``kvboost quality``: what 16-bit arithmetic alone does to the same answers."""

from __future__ import annotations

from typing import Any

from kvboost import GenerationMode, KVBoost
from kvboost.bench.quality.asked import MOST_BYTES, Asked, Comparison
from kvboost.bench.quality.rows import NOISE, NOISE_KINDS, QUESTIONS, Row
from kvboost.config import EngineConfig
from kvboost.model.loading.load import LoadedModel

WHOLE, SLICED = 1 << 20, 192


def kinds_of(task: str) -> tuple[str, ...]:
    """Long answers are compared with those in float32 only."""
    return NOISE_KINDS if task == QUESTIONS else NOISE_KINDS[:1]


class NoiseFloor:
    """Full prefills of one model in bfloat16."""

    def __init__(self, loaded: LoadedModel) -> None:
        config = EngineConfig(max_kv_bytes=MOST_BYTES, gpu_cache_bytes=0)
        self._whole, self._sliced = KVBoost(loaded, config), KVBoost(loaded, config)
        self._whole.runtime.backend.prefill_slice = WHOLE
        self._sliced.runtime.backend.prefill_slice = SLICED

    def rows(self, asked: Asked) -> list[Row]:
        exact: dict[str, Any] = {"mode": GenerationMode.PREFIX_CACHE, "cache_salt": NOISE}
        expected, rows = asked.logits, []
        for kind, engine in zip(kinds_of(asked.task), (self._whole, self._sliced), strict=False):
            given = engine.score(asked.prompt, asked.answer, **exact).logits
            row = asked.row(
                engine,
                Comparison.of(expected, given),
                exact,
                donor=NOISE,
                strategy=kind,
                ratio=0.0,
                ttft_ratio=1.0,
                charged_share=1.0,
            )
            rows.append(row)
            expected = given
        return rows

    def close(self) -> None:
        self._whole.close()
        self._sliced.close()
