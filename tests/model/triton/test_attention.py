"""Attention of scattered rows over pages, against attention written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest import MonkeyPatch

from kvboost.model.triton import attention as attention_kernels
from kvboost.model.triton import rows
from kvboost.model.triton.attention import attend
from kvboost.model.triton.rows import Ints, Tile, TiledRows, pick_parts
from support import torch_kernels
from support.paged_kv import (
    attention,
    each_dtype,
    make_pages,
    make_tables,
    random,
    scattered,
    tile_for,
    tiled,
)
from support.tiny import DEVICE

SCALE = 0.2


def close(given: torch.Tensor, expected: torch.Tensor) -> bool:
    limit = 2e-5 if given.dtype == torch.float32 else 2e-2
    return torch.allclose(given.float(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize(
    ("layout", "parts", "dtype"),
    [
        ("heads first", 1, torch.bfloat16),
        ("tokens first", 3, torch.float32),
        ("pages inside", 1, torch.float32),
    ],
)
def test_scattered_rows_of_two_requests(layout: str, parts: int, dtype: torch.dtype) -> None:
    torch.manual_seed(parts)
    pages = make_pages(24, 2, 16, 32, dtype, layout)
    tables = make_tables(2, 12, 24)
    positions = [scattered(23, 190), scattered(4, 65)]
    query = random(27, 6, 32, dtype=dtype)
    rows = tiled(positions, tables, query, pages, parts=parts)
    assert rows.tiles[:, 1].max() == rows.tile.rows and rows.tiles[:, 1].sum() == 27 * 3
    assert len(rows.items) == parts * len(rows.tiles) and rows.slots == len(rows.items) * (
        parts > 1
    )
    lse = random(27, 6)
    sinks = None if layout == "heads first" else torch.linspace(-1, 4, 6).to(DEVICE, dtype)
    given = attend(query, pages, rows, SCALE, lse=lse, sinks=sinks)
    expected, sums = attention(query, pages, positions, tables, SCALE, sinks=sinks)
    assert given.dtype == dtype and close(given, expected)
    assert torch.allclose(lse, sums, rtol=1e-3, atol=1e-3)
    written_out = torch_kernels.attend(query, pages, rows, SCALE, lse=lse, sinks=sinks)
    assert close(written_out, expected) and torch.allclose(lse, sums)


@each_dtype
def test_keys_that_are_copied_into_one_piece(dtype: torch.dtype, monkeypatch: MonkeyPatch) -> None:
    torch.manual_seed(2)
    pages = make_pages(12, 2, 16, 32, dtype, "tokens first")
    tables = make_tables(1, 12, 12)
    positions = [scattered(23, 150)]
    pages[tables[0, 9:].long()] = float("nan")  # never written
    pages[tables[0, 9].long(), :, : 150 % 16] = 0.5
    query = random(23, 6, 32, dtype=dtype)
    copied = []
    gather = attention_kernels.gather_counted
    monkeypatch.setattr(
        attention_kernels, "gather_counted", lambda *given: copied.append(1) or gather(*given)
    )
    tile = replace(tile_for(dtype), reads="piece")
    for parts in (1, 2):
        rows = tiled(positions, tables, query, pages, tile=tile, parts=parts)
        given = attend(query, pages, rows, SCALE, softcap=3.0)
        expected = attention(query, pages.nan_to_num(), positions, tables, SCALE, softcap=3.0)[0]
        assert close(given, expected)
    assert len(copied) == 2
    attend(query, pages.nan_to_num(), rows, SCALE, window=20)
    assert len(copied) == 2  # windows leave out most keys


@pytest.mark.parametrize(
    ("end", "requests", "dtype"),
    [(128, 1, torch.float32), (150, 1, torch.bfloat16), (150, 2, torch.float32)],
)
def test_whole_pages(end: int, requests: int, dtype: torch.dtype, monkeypatch: MonkeyPatch) -> None:
    """Rows at the end of a request, and one far before them: parts with pages that all rows see,
    that some of them see, and the last one, which may not be full."""
    torch.manual_seed(end)
    tile = replace(tile_for(dtype), reads="pages")
    pages = make_pages(14, 2, tile.keys, 32, dtype, "heads first").contiguous()
    tables = make_tables(requests, 5, 14)
    positions = [torch.tensor([70, *range(end - 9, end)]), torch.tensor([3, 89])][:requests]
    for table, own in zip(tables.long(), positions, strict=True):
        last = int(own[-1])
        pages[table[last // tile.keys + 1 :]] = float("nan")  # never written
        pages[table[last // tile.keys], :, last % tile.keys + 1 :] = float("nan")
    query = random(sum(map(len, positions)), 6, 32, dtype=dtype)
    used = []
    whole = attention_kernels.whole_pages

    def using(*given: object) -> object:
        found = whole(*given)
        used.extend([found] if found[0] is not None else [])
        return found

    monkeypatch.setattr(attention_kernels, "whole_pages", using)
    for parts in (1, 2):
        rows = tiled(positions, tables, query, pages, tile=tile, parts=parts)
        assert (rows.num_keys is None) == (requests > 1)
        given = attend(query, pages, rows, SCALE, softcap=3.0)
        expected = attention(query, pages.nan_to_num(), positions, tables, SCALE, softcap=3.0)[0]
        assert close(given, expected)
    assert len(used) == 2
    attend(query, pages.nan_to_num(), rows, SCALE, window=20)
    assert len(used) == 2  # windows leave out most pages
    with pytest.raises(ValueError, match="pages have 8 rows; a tile of"):
        attend(query, make_pages(9, 2, 8, 32, dtype, "heads first"), rows, SCALE)


@pytest.mark.parametrize(
    ("end", "rotated", "dtype"), [(128, 16, torch.float32), (150, 32, torch.bfloat16)]
)
def test_whole_pages_of_latents(
    end: int, rotated: int, dtype: torch.dtype, monkeypatch: MonkeyPatch
) -> None:
    torch.manual_seed(end)
    tile = replace(tile_for(dtype), reads="pages")
    pages = make_pages(7, 1, tile.keys, (32 + rotated) // 2, dtype, "heads first").contiguous()
    tables = make_tables(1, 5, 7)
    positions = [torch.tensor([70, *range(end - 9, end)])]
    table = tables[0].long()
    pages[table[(end - 1) // tile.keys + 1 :]] = float("nan")  # never written
    pages[table[(end - 1) // tile.keys], :, (end - 1) % tile.keys + 1 :] = float("nan")
    query = random(10, 9, 32 + rotated, dtype=dtype)
    used = []
    whole = attention_kernels.whole_pages
    monkeypatch.setattr(
        attention_kernels,
        "whole_pages",
        lambda *given: used.append(found := whole(*given)) or found,
    )
    for parts in (1, 2):
        rows = tiled(positions, tables, query, pages, tile=tile, parts=parts)
        given = attend(query, pages, rows, SCALE, softcap=3.0, rotated=rotated)
        expected, _ = attention(
            *(query, pages.nan_to_num(), positions, tables, SCALE), softcap=3.0, rotated=rotated
        )
        assert close(given[..., rotated:], expected)
    assert all(found[0] is not None and found[1] is not None for found in used)
    used.clear()
    given = attend(query, pages, rows, SCALE, rotated=rotated + 4)  # no power of two
    assert used == [(None, None)]
    expected, _ = attention(
        *(query, pages.nan_to_num(), positions, tables, SCALE), rotated=rotated + 4
    )
    assert close(given[..., rotated + 4 :], expected)


@pytest.mark.parametrize("few", [0, 1 << 14])
def test_parts_are_combined_in_programs_of_either_size(few: int, monkeypatch: MonkeyPatch) -> None:
    torch.manual_seed(4)
    monkeypatch.setattr(attention_kernels, "FEW_COMBINED", few)
    pages = make_pages(24, 1, 16, 32, torch.float32, "heads first")
    tables, positions = make_tables(1, 20, 24), [scattered(3, 310)]
    query = random(3, 2, 32)
    tile = replace(tile_for(torch.float32), keys=16)  # of small ones, there are many
    rows = tiled(positions, tables, query, pages, tile=tile, parts=11)
    given = attend(query, pages, rows, SCALE)
    assert close(given, attention(query, pages, positions, tables, SCALE)[0])


@pytest.mark.parametrize(
    ("dim", "heads", "dtype"), [(16, 10, torch.bfloat16), (80, 2, torch.float32)]
)
def test_odd_sizes(dim: int, heads: int, dtype: torch.dtype) -> None:
    """Dimensions and pages that are no powers of two, and one row at every border of a page."""
    torch.manual_seed(dim)
    pages = make_pages(11, 2, 48, dim, dtype, "tokens first")
    tables = make_tables(1, 4, 11)
    positions = [torch.tensor([0, 1, 47, 48, 63, 64, 95, 96, 127, 128, 129])]
    query = random(11, dim, heads, dtype=dtype).transpose(1, 2)  # strided
    given = attend(query, pages, tiled(positions, tables, query, pages), SCALE)
    assert close(given, attention(query, pages, positions, tables, SCALE)[0])


@pytest.mark.parametrize(
    ("dim", "rotated", "heads", "dtype"),
    [(32, 16, 20, torch.bfloat16), (20, 8, 16, torch.float32), (18, 6, 3, torch.float32)],
)
@pytest.mark.parametrize("parts", [1, 3])
def test_rows_that_are_keys_and_values_in_one(
    dim: int, rotated: int, heads: int, dtype: torch.dtype, parts: int
) -> None:
    """Latents, for more heads than one tile has rows and for fewer; some rows are hidden."""
    torch.manual_seed(dim)
    pages = make_pages(24, 1, 16, dim, dtype, "heads first")
    tables = make_tables(2, 12, 24)
    positions = [scattered(5, 190), scattered(2, 65)]
    for table, own in zip(tables.long(), positions, strict=True):
        pages[table[int(own[-1]) // 16 + 1 :]] = float("nan")  # never written
    query = random(9, 2 * dim, heads, dtype=dtype).transpose(1, 2)  # strided, and two are padding
    tile = replace(tile_for(dtype), rows=16)
    rows = tiled(positions, tables, query, pages, tile=tile, parts=parts)
    absent = torch.zeros(2, 192, dtype=torch.bool, device=DEVICE)
    absent[0, 3:40] = True
    absent[:, torch.cat(positions)] = False
    for options in ({}, {"absent": absent}, {"window": 30, "softcap": 3.0}):
        lse = random(7, heads)
        out = torch.full((9, heads, 2 * dim), 5.0, dtype=dtype, device=DEVICE)
        attend(query, pages, rows, SCALE, rotated=rotated, out=out, lse=lse, **options)  # type: ignore[arg-type]
        expected, sums = attention(
            *(query, pages.nan_to_num(), positions, tables, SCALE), rotated=rotated, **options
        )
        assert close(out[:7, :, rotated:], expected)
        assert torch.allclose(lse, sums, rtol=1e-3, atol=1e-3)
        assert (out[:, :, :rotated] == 5).all() and (out[7:] == 5).all()
        if options:
            continue
        written_out = torch_kernels.attend(query, pages, rows, SCALE, rotated=rotated)
        assert close(written_out[:7, :, rotated:], expected)
    with pytest.raises(ValueError, match="channels of 2 heads of latents rotate"):
        two = make_pages(24, 2, 16, dim, dtype, "heads first")
        attend(query, two, rows, SCALE, rotated=rotated)


@pytest.mark.parametrize("parts", [1, 2])
def test_windows_caps_and_absent_rows(parts: int) -> None:
    torch.manual_seed(3)
    pages = make_pages(20, 2, 16, 32, torch.float32, "tokens first")
    tables = make_tables(2, 10, 20)
    positions = [scattered(5, 150), scattered(3, 31)]
    query = random(8, 4, 32)
    rows = tiled(positions, tables, query, pages, parts=parts)
    for options in ({"window": 20}, {"window": 70, "softcap": 2.0}):
        given = attend(query, pages, rows, SCALE, **options)  # type: ignore[arg-type]
        assert close(given, attention(query, pages, positions, tables, SCALE, **options)[0])  # type: ignore[arg-type]
    absent = torch.rand(2, 160).to(DEVICE) < 0.3
    for number, own in enumerate(positions):
        absent[number, own.to(DEVICE)] = False
        lost = torch.arange(160, device=DEVICE)[absent[number]]
        pages[tables[number, lost // 16].long(), :, lost % 16] = float("nan")  # never written
    given = attend(query, pages, rows, SCALE, absent=absent)
    assert close(given, attention(query, pages.nan_to_num(), positions, tables, SCALE, absent)[0])


def test_a_row_that_sees_no_key_of_a_part_takes_nothing_of_it(monkeypatch: MonkeyPatch) -> None:
    """Hidden keys weigh exactly zero. If only a subtraction of scores made them so, a compiler that
    fuses it with the product before would leave the rounding error of a huge number."""
    parts = []

    class Kept:
        def __getitem__(self, grid: object) -> Callable[..., None]:
            return lambda written, lse, *_, **__: parts.extend([written[:, 0], lse[:, 0]])

    monkeypatch.setattr("kvboost.model.triton.attention._combine_kernel", Kept())
    pages = make_pages(8, 1, 16, 32, torch.float32, "heads first")
    query = random(2, 2, 32)
    rows = tiled([torch.tensor([0, 127])], make_tables(1, 8, 8), query, pages, parts=2)
    for options in ({}, {"window": 100}, {"softcap": 1.0}):
        parts.clear()
        attend(query, pages, rows, SCALE, **options)  # type: ignore[arg-type]
        written, lse = parts
        first, second = slice(0, 2), slice(2, 4)  # the two heads of a row
        assert not written[1, first].any() and bool((lse[1, first] < -1e29).all())
        assert written[1, second].any() and bool((lse[1, second] > -1e29).all())


def test_the_memory_after_the_last_row_is_not_used() -> None:
    pages = make_pages(4, 1, 16, 16, torch.float32, "heads first")
    tables = torch.tensor([[2, 1, 999, 999]], dtype=torch.int32, device=DEVICE)
    pages[1, :, 5:] = float("nan")
    positions = [torch.tensor([3, 20])]
    query = random(2, 2, 16)
    given = attend(query, pages, tiled(positions, tables, query, pages), SCALE)
    pages.nan_to_num_()
    assert close(given, attention(query, pages, positions, tables[:, :2], SCALE)[0])


def test_rows_that_are_not_there_get_zeros() -> None:
    """As those of a forward of a fixed size do: other numbers might not be finite."""
    pages = make_pages(4, 1, 16, 16, torch.float32, "heads first")
    tables = make_tables(1, 4, 4)
    positions = [torch.tensor([3, 20])]
    query = random(4, 2, 16)
    rows = tiled(positions, tables, query[:2], pages)
    described = [[0, 0, 4, 6, 0, 1, 0], [0, 6, 0, 2, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0]]
    items = torch.tensor(described, dtype=torch.int32, device=DEVICE)
    out = torch.full_like(query, float("nan"))
    attend(query, pages, replace(rows, items=items), SCALE, out=out)
    assert close(out[:2], attention(query[:2], pages, positions, tables, SCALE)[0])
    assert not out[2:].any()


def test_tiles_are_picked_by_the_number_of_rows() -> None:
    tables = torch.zeros(1, 64, dtype=torch.int32)
    sizes = {"page": 16, "heads": 4, "kv_heads": 1, "dtype": torch.bfloat16}
    few = TiledRows.of([torch.tensor([1000])], tables, **sizes)  # type: ignore[arg-type]
    assert few.tile.rows == 16 and few.most_parts == 1 and not few.slots
    many = TiledRows.of([torch.arange(1000)], tables, **sizes)  # type: ignore[arg-type]
    assert many.tile.rows == 128 and len(many.tiles) == 32  # 32 rows by 4 heads
    assert many.items[0, :4].tolist() == [0, 992 * 4, 8 * 4, 8 * 4]  # the most keys first
    assert many.items[-1, :4].tolist() == [0, 0, 128, 128]


def test_long_tiles_are_cut_so_that_all_programs_end_together() -> None:
    def parts(tiles: int, keys: int, kv_heads: int, least: int = 0) -> Ints:
        ends = np.linspace(least, keys, tiles + 1)[1:].astype(np.int32)
        return pick_parts(ends, kv_heads, at_once=132)

    assert parts(278, 32768, 4).max() == 1  # there are many more tiles than processors
    some = parts(62, 8192, 2)
    assert some.max() == 3 and some.min() == 1  # the longest would take twice the mean
    assert parts(1, 1000, 4).tolist() == [5]  # no part has fewer than 192 keys
    assert parts(1, 8192, 4).tolist() == [32]
    assert parts(1, 10**6, 1).tolist() == [32]
    assert parts(1, 300, 1).tolist() == [1]
    assert parts(6, 4096, 4, least=4095).tolist() == [5] * 6  # with six, twelve of 144 would wait
    equal = np.full(98, 20_000, np.int32)
    assert pick_parts(equal, 2, 132).tolist() == [2] * 98  # 196 whole ones would run twice
    assert pick_parts(equal, 2, 132, 32, most_items=100).tolist() == [1] * 98


def parts_one_by_one(
    ends: Ints, kv_heads: int, at_once: int, most_parts: int, most_items: int | None
) -> list[int]:
    """Slowly: every choice tried in turn, every program given to the next processor."""

    def until(parts: Ints) -> float:
        lengths = sorted(
            end / part + (rows.PART_COST if part > 1 else 0)
            for end, part in zip(ends.tolist(), parts.tolist(), strict=True)
            for _ in range(part * kv_heads)
        )[::-1]
        busy = [0.0] * at_once
        for start in range(0, len(lengths), at_once):
            some = lengths[start : start + at_once]
            order = range(at_once) if start // at_once % 2 == 0 else range(at_once)[::-1]
            for processor, length in zip(order, some, strict=False):
                busy[processor] += length
        return max(busy)

    longest, best = int(ends.max()), np.ones_like(ends)
    least = until(best)
    for twice in range(3, 2 * min(longest // rows.KEYS_PER_PART, most_parts) + 1):
        parts = np.maximum(1, -(-ends * twice // (2 * longest)))
        if most_items is not None and parts.sum() > most_items:
            break
        if (found := until(parts) + rows.COMBINING_COST) < least - 1e-6:
            best, least = parts, found
        if 2 * longest * at_once < twice * int(ends.sum()) * kv_heads / rows.SHORT_PARTS:
            break
    return best.tolist()


@given(
    st.lists(st.integers(1, 40_000), min_size=1, max_size=30),
    st.integers(1, 4),
    st.sampled_from([1, 7, 132]),
    st.sampled_from([4, 32]),
    st.none() | st.integers(30, 80),
)
def test_parts_are_picked_as_one_by_one(ends, kv_heads, at_once, most_parts, most_items) -> None:
    each = np.array(ends, np.int32)
    found = pick_parts(each, kv_heads, at_once, most_parts, most_items)
    expected = parts_one_by_one(each, kv_heads, at_once, most_parts, most_items)
    assert found.dtype == each.dtype and found.tolist() == expected


def test_hopper_reads_whole_pages(monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "copies_tiles", lambda *_: True)
    pages = torch.zeros(3, 2, 64, 256, dtype=torch.bfloat16)
    assert Tile.over(pages, 100).reads == Tile.over(pages, 17).reads == "pages"
    for others in (pages.transpose(1, 2).contiguous().transpose(1, 2), pages[:, :, :32]):
        assert Tile.over(others, 100) == Tile.pick(100, torch.bfloat16)
    assert Tile.over(pages, 16) == Tile.pick(16, torch.bfloat16)  # decode steps
    latents = torch.zeros(3, 1, 64, 576, dtype=torch.bfloat16)
    assert Tile.over(latents, 100) == Tile(64, 64, 8, 2, "pages")
    monkeypatch.setattr(rows, "copies_tiles", lambda *_: False)
    assert Tile.over(pages, 100) == Tile.pick(100, torch.bfloat16)


def test_whole_tiles() -> None:
    tile = Tile(128, 64, 8, 3)
    assert tile.whole(112, 7) == 109 and tile.whole(112, 16) == 112  # six tiles and 14
    assert tile.whole(16, 7) == 16  # not even one


def test_positions_that_do_not_fit_are_refused() -> None:
    tables = torch.zeros(1, 4, dtype=torch.int32)
    sizes = {"page": 16, "heads": 4, "kv_heads": 2, "dtype": torch.float32}
    for positions, message in [
        ([torch.tensor([3, 3])], r"positions \[3, 3\]; there must be some, ascending"),
        ([torch.tensor([], dtype=torch.int64)], "there must be some"),
        ([torch.tensor([5, 64])], "positions 5 to 64; its table of 4 pages of 16 rows ends at 64"),
        ([torch.tensor([1])] * 2, "2 requests have 1 tables"),
    ]:
        with pytest.raises(ValueError, match=message):
            TiledRows.of(positions, tables, **sizes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="4 heads over 3 KV heads"):
        TiledRows.of([torch.tensor([1])], tables, **{**sizes, "kv_heads": 3})  # type: ignore[arg-type]
    rows = TiledRows.of([torch.tensor([1])], tables, **sizes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"pages have shape \(2, 3, 4\)"):
        attend(torch.zeros(1, 4, 8), torch.zeros(2, 3, 4), rows, SCALE)
    for query in (torch.zeros(1, 6, 8), torch.zeros(0, 4, 8), torch.zeros(1, 4, 8).half()):
        with pytest.raises(ValueError, match=r"1 rows over these pages need torch.float32 \(1, 4"):
            attend(query, torch.zeros(4, 2, 16, 16), rows, SCALE)
