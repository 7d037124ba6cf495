"""Real weights: the bundled model, fetched on first use as any user's is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kvboost import KVBoost
from support.cores import cores_per_worker


@pytest.fixture(autouse=True)
def all_cores() -> Iterator[None]:
    """Real models use every core of the worker, unlike the tiny ones of the other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(cores_per_worker())
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def smollm() -> Iterator[KVBoost]:
    with KVBoost.from_pretrained("smollm2-135m", dtype="float32") as engine:
        yield engine
