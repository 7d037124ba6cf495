from __future__ import annotations

import pytest
import torch

from kvboost.model.kv import KVPool, KVShape, RequestKV
from kvboost.reuse.shift import RecomputedRows

SHAPE = KVShape(2, 3, 4, torch.float32, torch.device("cpu"))


def test_rows_are_written_in_place_contiguous_or_not() -> None:
    kv = RequestKV(SHAPE, 10)
    kv.data.zero_()
    kv.write(1, range(2, 4), torch.ones(1, 3, 2, 4), torch.full((1, 3, 2, 4), 2.0))
    kv.write(0, torch.tensor([0, 5]), torch.full((1, 3, 2, 4), 3.0), torch.full((1, 3, 2, 4), 4.0))
    assert kv.data[0, 1, :, 2:4].eq(1).all() and kv.data[1, 1, :, 2:4].eq(2).all()
    assert kv.data[0, 0, :, [0, 5]].eq(3).all() and kv.data[1, 0, :, [0, 5]].eq(4).all()
    assert kv.data.count_nonzero() == 4 * 3 * 2 * 4


def test_growing_doubles_and_keeps_what_is_there() -> None:
    kv = RequestKV(SHAPE, 1)
    capacity = kv.capacity
    kv.data.fill_(7)
    kv.reserve(capacity)
    assert kv.capacity == capacity
    kv.reserve(capacity + 1)
    assert kv.capacity == 2 * capacity
    assert kv.rows(0, capacity).eq(7).all()


def test_a_copy_is_contiguous_and_its_own() -> None:
    kv = RequestKV(SHAPE, 10)
    kv.data.fill_(1)
    copy = kv.copy_rows(2, 5)
    kv.data.fill_(2)
    assert copy.is_contiguous() and copy.shape == (2, 2, 3, 3, 4) and copy.eq(1).all()


def test_a_pool_lends_what_fits_and_keeps_a_few() -> None:
    pool = KVPool(SHAPE, max_idle=2)
    with pool.lend(300) as large, pool.lend(10) as small, pool.lend(10) as other:
        assert len({id(large), id(small), id(other)}) == 3
    assert pool.idle_bytes == large.data.nbytes + small.data.nbytes
    with pool.lend(5) as again:
        assert again is small
    few = KVPool(SHAPE, max_idle_bytes=small.data.nbytes)
    with few.lend(5), few.lend(5):
        pass
    assert few.idle_bytes == small.data.nbytes
    few.clear()
    assert few.idle_bytes == 0
    with pytest.raises(RuntimeError), pool.lend(300) as same:
        assert same is large
        raise RuntimeError
    with pool.lend(300) as same:
        assert same is large


def test_offsets_are_added_by_the_kernel_as_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = KVShape(2, 3, 64, torch.bfloat16, torch.device("cpu"))
    kv, other = RequestKV(shape, 100), RequestKV(shape, 100)
    kv.data.copy_(torch.randn(kv.data.shape))
    other.data.copy_(kv.data)
    which = torch.randint(0, 4, (50,))
    offsets = [torch.randn(3, 4, 64) for _ in range(3)]
    for one in offsets:
        one[:, -1] = 0  # the last is none
    turns = (torch.randn(50, 64).bfloat16(), torch.randn(50, 64).bfloat16())
    kv.shift(1, 20, which, (offsets[0], offsets[1]), turns, offsets[2])
    monkeypatch.setattr("kvboost.model.kv.has_kernels", lambda _: False)
    other.shift(1, 20, which, (offsets[0], offsets[1]), turns, offsets[2])
    assert torch.allclose(kv.data, other.data, rtol=2**-5, atol=2**-5)
    assert torch.equal(kv.data[:, 0], other.data[:, 0])
    assert torch.equal(kv.rows(70, 100), other.rows(70, 100))


def test_errors_are_added_up_by_the_kernel_as_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = KVShape(2, 3, 64, torch.bfloat16, torch.device("cpu"))
    kv = RequestKV(shape, 100)
    kv.data.copy_(torch.randn(kv.data.shape))
    fresh = torch.randn(1, 30, 6, 64).bfloat16().transpose(1, 2)  # as a layer has them
    index = torch.arange(0, 30, 2)
    which = torch.arange(15) % 3
    mean = (which == torch.arange(4)[:, None]) * torch.rand(15)
    rows = RecomputedRows(
        index, index * 3 + 1, which, mean, mean.sum(0), torch.randn(15, 64), torch.randn(15, 64)
    )
    given = kv.errors(1, fresh[:, :3], fresh[:, 3:], rows)
    monkeypatch.setattr("kvboost.model.kv.has_kernels", lambda _: False)
    expected = kv.errors(1, fresh[:, :3], fresh[:, 3:], rows)
    for one, other in zip(given, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-4)
