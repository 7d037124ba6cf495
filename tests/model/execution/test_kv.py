from __future__ import annotations

import pytest
import torch

from kvboost.model.execution.kv import KVPool, RequestKV
from kvboost.model.execution.kv_shape import KVShape

SHAPE = KVShape(2, 3, 4, torch.float32, torch.device("cpu"))


def test_rows_are_written_in_place_contiguous_or_not() -> None:
    kv = RequestKV(SHAPE, 10)
    kv.data.zero_()
    kv.write(1, range(2, 4), torch.ones(1, 3, 2, 4), torch.full((1, 3, 2, 4), 2.0))
    kv.write(0, torch.tensor([0, 5]), torch.full((1, 3, 2, 4), 3.0), torch.full((1, 3, 2, 4), 4.0))
    assert kv.data[0, 1, :, 2:4].eq(1).all() and kv.data[1, 1, :, 2:4].eq(2).all()
    assert kv.data[0, 0, :, [0, 5]].eq(3).all() and kv.data[1, 0, :, [0, 5]].eq(4).all()
    assert kv.data.count_nonzero() == 4 * 3 * 2 * 4


def test_growing_doubles_the_buffer_and_keeps_its_rows() -> None:
    kv = RequestKV(SHAPE, 1)
    capacity = kv.capacity
    kv.data.fill_(7)
    kv.reserve(capacity)
    assert kv.capacity == capacity
    kv.reserve(capacity + 1)
    assert kv.capacity == 2 * capacity
    assert kv.rows(0, capacity).eq(7).all()


def test_a_pool_lends_a_fitting_buffer_and_keeps_a_few() -> None:
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
