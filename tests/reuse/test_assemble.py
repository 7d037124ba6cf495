from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvboost.cache.quantize import NewRows, Quantizer
from kvboost.cache.tiers.arena import Arena
from kvboost.cache.tiers.open import Tiers
from kvboost.cache.tiers.ram import RamTier
from kvboost.model.execution.kv import RequestKV
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.paged.kv import PagedKV
from kvboost.model.paged.slab import PAGE, Slab
from kvboost.reuse.assemble import Packer
from kvboost.tokens.hashing import as_token_ids
from support.chunks import ROOT, chunk_store
from support.tiny import DEVICE

SHAPE = KVShape(3, 2, 8, torch.float32, torch.device(DEVICE))
ROWS = 12 * PAGE + 5


@pytest.fixture
def paged() -> PagedKV:
    torch.manual_seed(0)
    slab = Slab(SHAPE, num_pages=20, num_requests=4)
    assert slab.take(3 * PAGE) is not None
    holding = slab.take(ROWS)
    assert holding is not None
    kv = PagedKV(slab, holding)
    with kv.filling(0, ROWS) as rows:
        rows.copy_(torch.randn(rows.shape))
    return kv


@pytest.mark.parametrize("bits", [16, 8])
def test_rows_in_pages_are_packed_as_those_in_a_buffer(paged: PagedKV, bits: int) -> None:
    buffer = RequestKV(SHAPE, ROWS)
    with buffer.filling(0, ROWS) as rows:
        rows.copy_(paged.rows(0, ROWS))
    packer = Packer(Quantizer(bits, None))
    ends = [7, 40, 40 + PAGE, 200, ROWS]
    parts = [NewRows(start, end) for start, end in zip([3, *ends], ends, strict=False)]
    for one, other in zip(packer.packing(paged)(parts), packer.packing(buffer)(parts), strict=True):
        assert one.tensors.keys() == other.tensors.keys()
        assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


class Calls(TorchDispatchMode):
    """Counts what torch would have a GPU do."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        if "view" not in str(func):
            self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Elsewhere(RamTier):
    """Takes tensors of the device for those of another one."""

    def _is_here(self, tensor: torch.Tensor) -> bool:
        return False


class Passed:
    def query(self) -> bool:
        return True


def test_many_chunks_take_as_many_calls_as_few(paged: PagedKV) -> None:
    counts = []
    for num_chunks in (2, 12):
        arena = Arena(partial(torch.zeros, dtype=torch.uint8), 1 << 20, Passed, block_bytes=1 << 20)
        store = chunk_store(Tiers(Elsewhere(1 << 20, arena=arena)), PAGE)
        ids = as_token_ids(range(num_chunks * PAGE))
        with Calls() as calls:
            new = store.admit(
                ROOT, ids, Packer(Quantizer(16, None)).packing(paged), exact_rows=len(ids)
            )
        assert new == num_chunks
        counts.append(calls.count)
        store.close()
    assert counts[0] == counts[1]
    assert counts[0]["aten.index_select.default"] == 1
    assert counts[0]["aten.split_with_sizes_copy.default"] == 1
    assert counts[0]["aten._foreach_copy_.default"] == 1
