"""Stores with several tiers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from kvboost.cache.chunk import Origin
from kvboost.cache.store import ChunkStore
from kvboost.cache.tiers.disk import DiskTier
from kvboost.cache.tiers.gpu import GpuTier
from kvboost.cache.tiers.open import Tiers
from kvboost.cache.tiers.ram import RamTier
from kvboost.cache.tiers.remote.tier import RemoteTier
from support.chunks import ORIGIN, chunk_store
from support.tiered import CHUNK, CHUNK_BYTES


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., ChunkStore]]:
    opened: list[ChunkStore] = []

    def open_store(
        ram: int = 1000,
        disk: int | None = 1000,
        gpu: int = 0,
        remote: RemoteTier | None = None,
        origin: Origin = ORIGIN,
        folder: str = "kv",
    ) -> ChunkStore:
        """Budgets in chunks; a file takes about four thirds of its data here."""
        tiers = Tiers(
            RamTier(ram * CHUNK_BYTES),
            GpuTier(gpu * CHUNK_BYTES, torch.device("cpu")) if gpu else None,
            None if disk is None else DiskTier(tmp_path / folder, disk * 4 * CHUNK_BYTES),
            remote,
        )
        opened.append(chunk_store(tiers, CHUNK, origin=origin, window=CHUNK))
        return opened[-1]

    yield open_store
    for store in opened:
        store.close()
