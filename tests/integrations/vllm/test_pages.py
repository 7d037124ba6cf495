from __future__ import annotations

import pytest
import torch

from kvboost.errors import UnsupportedModelError
from kvboost.integrations.vllm.pages import Pages, check_sizes
from support.made_up_pages import (
    BLOCKS,
    DIM,
    FORMS,
    KV_HEADS,
    LAYERS,
    PAGE,
    Layer,
    coarse_write,
    make_caches,
    make_pages,
    packed_write,
    plain_write,
)

each_form = pytest.mark.parametrize("form", FORMS)


@each_form
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_rows_are_read_as_they_were_written(form: str, dtype: torch.dtype) -> None:
    write, tokens_first = {
        "heads first": (plain_write, False),
        "tokens first": (plain_write, True),
        "packed": (packed_write, False),
    }[form]
    pages = make_pages(write, tokens_first=tokens_first, dtype=dtype)
    assert pages.is_plain == (form != "packed")
    assert pages.row_bytes == 2 * LAYERS * KV_HEADS * DIM * dtype.itemsize
    slots = torch.randperm(BLOCKS * PAGE)[:20]
    rows = torch.randn(2, LAYERS, KV_HEADS, 20, DIM).to(dtype)
    pages.write_all(rows, slots)
    assert torch.equal(pages.read_all(slots), rows)
    keys, values = pages.read(1, slots[3:5])
    assert torch.equal(keys, rows[0, 1, :, 3:5].transpose(0, 1))
    assert torch.equal(values, rows[1, 1, :, 3:5].transpose(0, 1))


@each_form
def test_other_rows_stay_as_they_are(form: str) -> None:
    pages = FORMS[form]()
    everything = torch.arange(BLOCKS * PAGE)
    rows = torch.randn(2, LAYERS, KV_HEADS, BLOCKS * PAGE, DIM)
    pages.write_all(rows, everything)
    some = torch.tensor([3, PAGE, 5 * PAGE + 1])
    rows[:, :, :, some] = torch.randn(2, LAYERS, KV_HEADS, 3, DIM)
    pages.write_all(rows[:, :, :, some], some)
    assert torch.equal(pages.read_all(everything), rows)


@each_form
@pytest.mark.parametrize(
    "span", [(0, 3 * PAGE), (1, PAGE), (PAGE - 1, 2 * PAGE + 1), (PAGE, PAGE + 1)]
)
def test_rows_of_copied_pages_are_those_that_were_written(form: str, span: tuple[int, int]) -> None:
    pages, table = FORMS[form](), torch.tensor([5, 1, 3])
    rows = torch.randn(2, LAYERS, KV_HEADS, 3 * PAGE, DIM)
    pages.write_all(rows, pages.slots(table, torch.arange(3 * PAGE)))
    copied = pages.copy([table])
    for cache in pages.caches:
        cache.zero_()
    assert torch.equal(pages.rows_of(copied, *span), rows[:, :, :, slice(*span)])


@each_form
def test_finding_the_layout_writes_to_no_page(form: str) -> None:
    pages = FORMS[form]()
    assert all((cache == 0).all() for cache in pages.caches)


def test_the_slots_of_a_sequence_follow_its_pages() -> None:
    pages = make_pages()
    rows = torch.tensor([0, PAGE - 1, PAGE, 2 * PAGE + 3])
    assert pages.slots([4, 2, 6], rows).tolist() == [4 * PAGE, 5 * PAGE - 1, 2 * PAGE, 6 * PAGE + 3]


def test_a_quantised_cache_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="plain numbers"):
        make_pages(coarse_write)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_a_cache_of_codes_is_refused_before_its_kernel_is_called(dtype: torch.dtype) -> None:
    def never(*_: object) -> None:
        raise AssertionError("this kernel takes no codes")

    with pytest.raises(UnsupportedModelError, match=str(dtype)):
        make_pages(never, dtype=dtype)


def test_packed_pages_that_are_not_contiguous_are_refused() -> None:
    caches = {name: cache[::2] for name, cache in make_caches(blocks=2 * BLOCKS).items()}
    with pytest.raises(UnsupportedModelError, match="not contiguous"):
        Pages(caches, [Layer(packed_write) for _ in caches])
    pages = Pages(caches, [Layer(plain_write) for _ in caches])  # plain ones are read by strides
    rows = torch.randn(2, LAYERS, KV_HEADS, 9, DIM)
    pages.write_all(rows, torch.arange(9))
    assert torch.equal(pages.read_all(torch.arange(9)), rows)


def test_layers_of_different_shapes_are_refused() -> None:
    caches = make_caches()
    caches["layers.1"] = torch.zeros(BLOCKS, KV_HEADS, PAGE, 4 * DIM)
    with pytest.raises(UnsupportedModelError, match="different shapes"):
        Pages(caches, [Layer(plain_write) for _ in caches])


def test_a_kernel_that_splits_pages_is_named() -> None:
    pages = make_pages()
    check_sizes(PAGE, pages)
    with pytest.raises(UnsupportedModelError, match="--attention-backend"):
        check_sizes(2 * PAGE, pages)
    for layer, cache in zip(pages.layers, pages.caches, strict=True):
        layer.kv_cache = cache.view(2 * len(cache), cache.shape[1], PAGE // 2, -1)  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedModelError, match=f"kernel pages of {PAGE // 2}"):
        check_sizes(PAGE, pages)
