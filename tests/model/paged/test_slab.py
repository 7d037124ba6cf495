"""Pages: who has them, and that none is lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvboost import KVTooLargeError
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.paged.kv import PagedKV
from kvboost.model.paged.pool import PagedPool
from kvboost.model.paged.slab import PAGE, SCRATCH, Holding, KeptPages, Slab, pages_for
from support.tiny import DEVICE

SHAPE = KVShape(2, 2, 4, torch.float32, torch.device(DEVICE))


def test_a_request_has_whole_pages_and_a_row_of_the_table() -> None:
    slab = Slab(SHAPE, num_pages=8, num_requests=2)
    one = slab.take(PAGE + 1)
    assert one is not None and len(one.pages) == 2 and one.row != SCRATCH
    assert SCRATCH not in one.pages
    assert slab.table[one.row, :2].tolist() == one.pages
    assert slab.used_bytes == 2 * PAGE * SHAPE.row_bytes
    assert slab.extend(one, 4 * PAGE) and len(one.pages) == 4
    assert slab.table[one.row, :4].tolist() == one.pages
    slab.release(one)
    assert slab.used_bytes == 0 and slab.check_integrity() == []


def test_too_many_pages_or_requests_are_refused_and_change_nothing() -> None:
    slab = Slab(SHAPE, num_pages=4, num_requests=2, most_pages=3)
    assert slab.take(4 * PAGE) is None  # more than one request may have
    first, second = slab.take(2 * PAGE), slab.take(PAGE)
    assert first is not None and second is not None
    assert slab.take(PAGE) is None  # no row of the table is left
    assert not slab.extend(second, 3 * PAGE)
    assert len(second.pages) == 1
    for holding in (first, second):
        slab.release(holding)
    assert slab.check_integrity() == []


def test_replacing_shared_pages_copies_them() -> None:
    slab = Slab(SHAPE, num_pages=8, num_requests=3)
    first = slab.take(2 * PAGE)
    assert first is not None
    slab.data[:, first.pages] = torch.randn_like(slab.data[:, first.pages])
    second = slab.take(3 * PAGE, first.pages)
    assert second is not None and slab.replace(second, 2)
    assert not set(first.pages) & set(second.pages)
    assert torch.equal(slab.data[:, second.pages[:2]], slab.data[:, first.pages])
    assert slab.table[second.row, :3].tolist() == second.pages


def test_a_leak_is_found() -> None:
    slab = Slab(SHAPE, num_pages=2, num_requests=1)
    assert slab.take(1) is not None
    assert any("is held" in fault for fault in slab.check_integrity())


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(1, 5 * PAGE)), max_size=30))
def test_no_page_is_lost_or_given_twice(moves: list[tuple[int, int]]) -> None:
    slab = Slab(SHAPE, num_pages=12, num_requests=4)
    held: list[Holding] = []
    kept: list[KeptPages] = []
    for kind, rows in moves:
        chosen = held[rows % len(held)] if held else None
        if kind == 0 and held:
            slab.release(held.pop(rows % len(held)))
        elif kind == 1 and chosen is not None:
            slab.extend(chosen, rows)
        elif kind == 3 and chosen is not None:
            slab.replace(chosen, 1)
        elif kind == 4 and chosen is not None:
            kept += slab.keep([chosen.pages[: 1 + rows % 4]])
        elif kind == 5:
            kept += filter(None, [slab.keep_free(1 + rows % 2)])
        elif kind == 6 and kept:
            del kept[rows % len(kept)]
        elif kind == 7 and kept:
            shared = list(kept[rows % len(kept)].pages)
            taken = slab.take(max(rows, len(shared) * PAGE), shared)
            held += [taken] if taken is not None else []
        elif kind == 2 and held:
            shared = held[rows % len(held)].pages[:2]
            taken = slab.take(max(rows, len(shared) * PAGE), shared)
            held += [taken] if taken is not None else []
        elif (taken := slab.take(rows)) is not None:
            assert not set(taken.pages) & {page for one in (*held, *kept) for page in one.pages}
            held.append(taken)
        used = {page for holding in held for page in holding.pages}
        assert slab.used_bytes == len(used) * slab.page_bytes
        assert slab.num_free == 12 - len(used | {page for one in kept for page in one.pages})
        rows_held = [holding.row for holding in held]
        assert len(set(rows_held)) == len(rows_held)
    for holding in held:
        slab.release(holding)
    assert slab.check_integrity() == []
    kept.clear()
    assert slab.num_free == 12


def test_kept_pages_go_when_a_request_needs_them() -> None:
    slab = Slab(SHAPE, num_pages=4, num_requests=2)
    first = slab.take(3 * PAGE)
    assert first is not None
    kept = slab.keep([first.pages[:2], first.pages[2:]])
    slab.release(first)
    assert slab.num_free == 1 and slab.used_bytes == 0
    asked: list[int] = []

    def free(number: int) -> None:
        asked.append(number)
        while kept and slab.num_free < number:
            kept.pop()

    slab.free_kept = free
    second = slab.take(2 * PAGE)
    assert second is not None and asked == [2] and len(kept) == 1
    assert slab.take(3 * PAGE) is None  # the pages of a running request stay
    slab.release(second)
    assert slab.check_integrity() == []


def test_few_free_pages_are_reported_before_none_is_left() -> None:
    slab = Slab(SHAPE, num_pages=8, num_requests=4)
    slab.num_spare = 3
    left: list[int] = []
    slab.on_low = lambda: left.append(slab.num_free)  # it may ask the slab
    first = slab.take(5 * PAGE)
    assert first is not None and not left
    second = slab.take(PAGE)
    assert second is not None and left == [2]
    assert slab.extend(second, 2 * PAGE) and left == [2, 1]
    slab.release(first)
    third = slab.take(PAGE)
    assert third is not None and left == [2, 1]


def test_a_pool_without_space_lends_a_buffer() -> None:
    slabs: list[Slab] = []
    size = 3 * PAGE * SHAPE.row_bytes
    pool = PagedPool(SHAPE, size, max_running=4, context=1024, on_slab=slabs.append)
    assert not slabs  # nothing is allocated before a request comes
    with pool.lend(2 * PAGE) as paged, pool.lend(2 * PAGE) as buffer:
        assert isinstance(paged, PagedKV) and not isinstance(buffer, PagedKV)
        assert buffer.capacity >= 2 * PAGE
    assert slabs == [pool.slab] and slabs[0].num_pages == 3
    assert pool.bytes_for(PAGE + 1) == 2 * pool.slab.page_bytes
    assert pool.slab.check_integrity() == []


def test_a_pool_shares_pages() -> None:
    pool = PagedPool(SHAPE, 1 << 20, max_running=4, context=256, on_slab=lambda _: None)
    first_rows, second_rows = 2 * PAGE + 36, 3 * PAGE
    with pool.lend(first_rows) as first:
        prefix = first.share(2 * PAGE + 5)
        assert prefix.count == 2 * PAGE
        with pool.lend(second_rows, prefix) as second:
            spared = 2 * PAGE * SHAPE.row_bytes
            assert second.own_start == 2 * PAGE and second.spared_bytes == spared
            assert first.spared_bytes == 0
            held = first.memory() | second.memory()
            own = pages_for(first_rows) + pages_for(second_rows) - 2
            assert sum(held.values()) == own * pool.slab.page_bytes
            second.detach_prefix()
            assert second.own_start == 0 and second.base is None
        assert pool.check_integrity() == []  # what a request holds is no leak
    assert pool.check_integrity() == []
    pool.slab.take(10)
    assert any("is held" in fault for fault in pool.check_integrity())


def test_a_request_that_outgrows_the_slab_is_told() -> None:
    pool = PagedPool(SHAPE, 2 * PAGE * SHAPE.row_bytes, 1, 1024, on_slab=lambda _: None)
    with pool.lend(PAGE) as kv, pytest.raises(KVTooLargeError, match="max_kv_bytes"):
        kv.reserve(5 * PAGE)
