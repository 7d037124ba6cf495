"""The cache on a GPU is pages of ended requests: nothing is copied, and no row changes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvboost import KVBoost
from kvboost.cache.lookup.hits import KnownRows
from kvboost.cache.mixed import states_of
from kvboost.cache.tiers.residency import Residency
from kvboost.model import triton
from kvboost.model.execution.kv import Prefix
from kvboost.model.paged.pool import PagedPool
from kvboost.model.paged.slab import PAGE, Slab
from support.paged_engines import SMALL, leaks, paged_engine
from support.prompts import BASELINE, EXACT, SLOPPY
from support.tiny import DEVICE

if not triton.is_available():
    pytest.skip("triton is not installed", allow_module_level=True)

from kvboost.cache.quantize import PLAIN, plain
from kvboost.reuse.paged.stored import PagedData, PageStore
from support.torch_kernels import use_torch_kernels

MEMORY = 200_000
"""For some pages of the small model."""
TEXT = [(7 * index + 3) % 250 for index in range(100)]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Iterator[KVBoost]:
    if DEVICE == "cpu":
        use_torch_kernels(monkeypatch)
    options = {"max_kv_bytes": MEMORY, "chunk_size": PAGE}
    with paged_engine(monkeypatch, "phi3", sizes=SMALL, **options) as made:
        yield made
        assert leaks(made) == [] and made.check_integrity() == []


def slab_of(engine: KVBoost) -> Slab:
    pool = engine.runtime.pool
    assert isinstance(pool, PagedPool)
    return pool.slab


def kept(engine: KVBoost) -> list[PagedData]:
    """The chunks that are pages."""
    holdings = engine.runtime.store.holdings
    found = [holdings.residency.ready(key) for key in holdings.catalogue]
    return [one.data for one in found if one is not None and isinstance(one.data, PagedData)]


def shared_rows(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows of the cache each later request will share."""
    counts: list[int] = []
    backend = engine.runtime.backend
    find = backend.kept_prefix

    def watched(known: KnownRows, most_rows: int) -> Prefix | None:
        found = find(known, most_rows)
        counts.append(0 if found is None else found.count)
        return found

    monkeypatch.setattr(backend, "kept_prefix", watched)
    return counts


def test_a_request_that_begins_alike_holds_the_same_pages(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = shared_rows(engine, monkeypatch)
    engine.generate(TEXT, 2, EXACT, ignore_eos=True)
    pages = sorted({page for data in kept(engine) for page in data.kept.pages})
    assert len(pages) == 2 and slab_of(engine).used_bytes == 0  # they hold back nobody
    before = slab_of(engine).data[:, pages].clone()
    prompt = [*TEXT[:80], 9, 8, 7]
    result = engine.generate(prompt, 3, EXACT, ignore_eos=True)
    assert counts == [0, PAGE]  # whole pages; the other 16 rows are copied
    assert result.exact_tokens == 80 and {span.tier for span in result.reuse.spans} == {"gpu", None}
    expected = engine.generate(prompt, 3, BASELINE, ignore_eos=True)
    assert result.token_ids == expected.token_ids
    assert torch.equal(slab_of(engine).data[:, pages], before), "shared rows were written"
    stats = engine.cache_stats()["tiers"]
    assert stats["ram"]["chunks"] == 0 and stats["gpu"]["hits"] == 2


def test_rows_whose_logits_are_asked_for_are_computed(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the cache goes beyond the first of them."""
    answer = engine.generate(TEXT, 2 * PAGE, EXACT, ignore_eos=True).token_ids
    counts = shared_rows(engine, monkeypatch)
    scored = engine.score(TEXT, answer, EXACT)
    assert counts == [PAGE] and len(scored.logits) == len(answer)
    full = engine.score(TEXT, answer, BASELINE)
    torch.testing.assert_close(scored.logits, full.logits, rtol=1e-3, atol=1e-3)


def test_a_request_that_needs_pages_sends_chunks_to_ram(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = engine.generate(TEXT, 2, EXACT, ignore_eos=True)
    rows = [data.tensors[PLAIN] for data in kept(engine)]
    slab = slab_of(engine)
    assert 4 < slab.num_pages < 60
    others = []
    while (holding := slab.take(PAGE)) is not None:
        others.append(holding)
    assert slab.num_free == 0 and not kept(engine)
    slab.data.zero_()  # as a request would write to them
    for holding in others:
        slab.release(holding)
    stats = engine.cache_stats()["tiers"]
    assert stats["ram"]["chunks"] == len(rows) and stats["gpu"]["chunks"] == 0
    counts = shared_rows(engine, monkeypatch)
    again = engine.generate(TEXT, 2, EXACT, ignore_eos=True)
    assert again.exact_tokens == len(TEXT) - 1 and again.token_ids == first.token_ids
    found = sorted(kept(engine), key=lambda data: data.num_rows)
    rows.sort(key=lambda one: one.shape[3])
    assert all(torch.equal(data.tensors[PLAIN], one) for data, one in zip(found, rows, strict=True))
    engine.generate(TEXT, 2, EXACT, ignore_eos=True)
    assert counts == [0, PAGE]  # it came back with the request before


def test_rows_that_can_be_moved_again_are_not_copied_to_ram(engine: KVBoost) -> None:
    def lineages() -> set[str]:
        return {info.lineage.value for info in store.holdings.catalogue.infos().values()}

    store = engine.runtime.store
    prompt = [5, 6, 7, *TEXT, *TEXT[:20]]
    engine.generate(TEXT, 1, EXACT, ignore_eos=True)
    moved = engine.generate(prompt, 1, ignore_eos=True, **SLOPPY)
    assert moved.moved_tokens and lineages() == {"exact", "approximate"}
    store.free_gpu(lambda: not kept(engine))
    assert lineages() == {"exact"}
    again = engine.generate(prompt, 1, ignore_eos=True, **SLOPPY)
    assert (again.moved_tokens, again.token_ids) == (moved.moved_tokens, moved.token_ids)


@pytest.mark.parametrize("is_bounded", [False, True])
def test_a_thread_frees_pages_before_requests_need_them(
    is_bounded: bool, engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether pages become few, or what ``gpu_cache_bytes`` allows."""
    for module in ("kvboost.runtime.paged_backend", "kvboost.cache.tiers.gpu"):
        monkeypatch.setattr(f"{module}.SPARE_SHARE", 4)
    engine.generate([1], 1)
    slab, tier = slab_of(engine), engine.runtime.store.holdings.residency._gpu
    assert tier is not None
    if is_bounded:
        tier.max_bytes //= 3
    monkeypatch.setattr(slab, "free_kept", lambda _: pytest.fail("a request had to free pages"))
    evicted_by: set[str] = set()
    evict = Residency._evict

    def watched(residency: Residency, *args: Any) -> bool:
        evicted_by.add(threading.current_thread().name)
        return evict(residency, *args)

    monkeypatch.setattr(Residency, "_evict", watched)
    for start in range(slab.num_pages):
        engine.generate([start, *TEXT[1:PAGE]], 1, EXACT, ignore_eos=True)
        end = time.monotonic() + 20
        while slab.num_free < slab.num_spare or not tier.has_spare():
            assert time.monotonic() < end, "the thread freed too few pages"
            time.sleep(0.001)
    assert engine.cache_stats()["tiers"]["ram"]["chunks"] > 0
    assert evicted_by == {"kvboost-pages"}


def test_forgotten_rows_stay_for_a_request_that_reads_them(engine: KVBoost) -> None:
    engine.generate(TEXT, 1, EXACT, ignore_eos=True)
    data = kept(engine)[0]
    free = slab_of(engine).num_free
    rows = data.tensors[PLAIN]
    engine.clear()
    assert not kept(engine) and slab_of(engine).num_free >= free
    assert not set(data.kept.pages) & set(slab_of(engine)._free_pages)
    assert torch.equal(data.tensors[PLAIN], rows)
    del data
    assert slab_of(engine).num_free == slab_of(engine).num_pages


@pytest.mark.parametrize("options", [{"keep": False}, {"cache_salt": "other"}, {"mode": BASELINE}])
def test_what_is_not_kept_or_not_alike_is_not_shared(
    options, engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.generate(TEXT, 1, **{"mode": EXACT, "ignore_eos": True, **options})
    counts = shared_rows(engine, monkeypatch)
    engine.generate([*TEXT, 1], 1, EXACT, ignore_eos=True)
    assert counts == [0]


@pytest.mark.parametrize("position", [0, 128, 40])
def test_rows_from_elsewhere_keep_their_place_in_a_page(position: int, engine: KVBoost) -> None:
    engine.generate([1], 1)
    slab = slab_of(engine)
    store = PageStore(slab)
    rows = torch.randn(2, slab.shape.num_layers, slab.shape.num_kv_heads, 150, slab.shape.head_dim)
    rows = rows.to(slab.shape.device, slab.shape.dtype)
    brought = store.bring(plain(rows), position)
    assert isinstance(brought, PagedData) and brought.first == position % PAGE
    assert torch.equal(brought.tensors[PLAIN], rows)
    assert brought.nbytes == rows.nbytes and brought.num_tokens == 150
    pieces = brought.pieces(3, 140)
    found = [slab.rows(page)[:, :, :, start : start + n] for page, start, n in pieces]
    assert torch.equal(torch.cat(found, 3), rows[:, :, :, 3:143])


def test_asking_pages_for_states_copies_no_rows(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.generate(TEXT, 2, EXACT, ignore_eos=True)
    monkeypatch.setattr(PagedData, "gather", None)
    found = kept(engine)
    assert found and all(states_of(data) == [] for data in found)
