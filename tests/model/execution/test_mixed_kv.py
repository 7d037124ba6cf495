from __future__ import annotations

import torch

from kvboost.model.execution.kv_shape import KVShape, MixedShape, shape_of
from kvboost.model.execution.mixed_kv import MixedKV, make_pool

CPU = torch.device("cpu")
LARGE, SMALL = (KVShape(2, 2, 8, torch.float32, CPU), KVShape(1, 1, 4, torch.float32, CPU))
SHAPE = MixedShape((LARGE, SMALL), ((0, 0), (1, 0), (0, 1)))


def fill(kv: MixedKV, start: int, end: int) -> list[torch.Tensor]:
    """Writes random rows into all layers and returns them, keys and values for each layer."""
    written = []
    for layer in range(SHAPE.num_layers):
        shape = SHAPE.of(layer)
        rows = torch.randn(2, 1, shape.num_kv_heads, end - start, shape.head_dim)
        kv.write(layer, range(start, end), *rows)
        written.append(rows)
    return written


def assert_holds(kv: MixedKV, written: list[torch.Tensor], start: int = 0) -> None:
    for layer, rows in enumerate(written):
        assert torch.equal(torch.stack(kv.layer(layer, start, start + rows.shape[3])), rows)


def test_the_shape_groups_layers_that_are_alike() -> None:
    keys = [torch.zeros(1, heads, 1, dim) for heads, dim in ((2, 8), (1, 4), (2, 8))]
    assert shape_of(keys) == SHAPE
    assert shape_of(keys[:1] * 2) == LARGE
    assert SHAPE.row_bytes == 4 * (2 * 2 * 2 * 8 + 2 * 4)
    assert [SHAPE.of(layer).head_dim for layer in range(3)] == [8, 4, 8]


def test_rows_are_read_as_they_were_written_also_after_growing() -> None:
    kv = MixedKV(SHAPE, 10)
    written = fill(kv, 0, 10)
    kv.reserve(kv.capacity + 1)
    assert_holds(kv, written)
    kv.clear(2, 5)
    assert all(part[:, :, 2:5].eq(0).all() for part in kv.layer(1, 0, 10))


def test_requests_share_rows_and_part_from_them() -> None:
    pool = make_pool(SHAPE, 2)
    with pool.lend(20) as first:
        assert isinstance(first, MixedKV)
        written = fill(first, 0, 20)
        base = first.share(20)
        assert first.share(20) is base and base.first(8) is base.first(8)
        with pool.lend(30, base.first(8)) as second:
            assert second.base is not None and second.own_start == 8
            own = fill(second, 8, 30)
            both = [torch.cat([a[..., :8, :], b], -2) for a, b in zip(written, own, strict=True)]
            assert_holds(second, both)
            assert_holds(first, written)
            assert second.spared_bytes == 8 * SHAPE.row_bytes
        with pool.lend(30, base.first(8)) as third:
            third.prepare_repair()
            assert third.base is None
            assert_holds(third, [rows[..., :8, :] for rows in written])
    assert pool.idle_bytes > 0  # the second's buffer; the first's is gone with those who read it
