"""Conversations over moved passages, and whether what the cache calls exact is exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from kvboost import KVBoost
from kvboost.model.execution.mixed_kv import make_kv
from kvboost.model.execution.segment import Segment
from kvboost.tokens.hashing import as_token_ids
from support.prompts import HEADER, PASSAGES

SLOPPY: dict[str, Any] = {"recompute_strategy": "none", "ignore_eos": True, "heal": "idle"}


def warmed(engine: KVBoost, salt: str = "") -> KVBoost:
    """The passages, each read after the header alone: elsewhere they are moved."""
    for passage in PASSAGES:
        engine.warm([*HEADER, *passage], cache_salt=salt)
    return engine


def heal_until(engine: KVBoost, stop: Callable[[], bool]) -> None:
    """Heals the next conversation, as idle time does, until ``stop`` says so."""
    engine._healer.heal_next(stop)


def num_exact(engine: KVBoost, ids: Sequence[int], salt: str = "") -> int:
    """How many rows of a sequence an exact hit covers. They must be those of a full prefill."""
    runtime = engine.runtime
    found = make_kv(engine.model.forward.shape, len(ids))
    with runtime.store.lookup(runtime.root(salt), as_token_ids(ids)) as known:
        for hit, data in runtime.store.fetch(known.exact):
            runtime.backend.packer.place(hit, data, found)
        end = known.exact[-1].end if known.exact else 0
    if end:
        full = make_kv(engine.model.forward.shape, len(ids))
        engine.model.forward([Segment(full, torch.tensor(ids[:end]), range(end))])
        far = max(
            float((ours - theirs).abs().max())
            for layer in range(full.shape.num_layers)
            for ours, theirs in zip(
                found.layer(layer, 0, end), full.layer(layer, 0, end), strict=True
            )
        )
        assert far < 1e-3, f"rows that are called exact are off by {far:.3g}"
    return end
