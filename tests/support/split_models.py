"""Tiny models in folders, and engines that split them over two processes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from kvboost import KVBoost
from kvboost.config import EngineConfig
from kvboost.runtime.parallel.runtime import ParallelRuntime, Ranks, load_parallel
from support.tiny import save_tiny

OPTIONS: dict[str, Any] = {"chunk_size": 16, "reuse_moved": "always"}
"""Moved text is reused however fast the machine is."""


def save_model(name: str, folder: Path) -> Path:
    """A tiny model of this architecture as a folder; of 512 tokens, so that KV has to grow."""
    place = folder / name
    if not place.exists():
        save_tiny(place, name, max_position_embeddings=512)
    return place


def whole_engine(folder: Path, **options: Any) -> KVBoost:
    return KVBoost.from_pretrained(folder, dtype="float32", **{**OPTIONS, **options})


def split_engine(ranks: Ranks, folder: Path, **options: Any) -> KVBoost:
    """An engine over ``ranks``, which do not end with it."""
    model = load_parallel(ranks, folder, {"strict": True, "dtype": "float32"})
    runtime = partial(ParallelRuntime, ranks, owns_ranks=False)
    return KVBoost(model, EngineConfig(**{**OPTIONS, **options}), None, runtime)
