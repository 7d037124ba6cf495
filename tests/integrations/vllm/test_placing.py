from __future__ import annotations

from typing import Any

import pytest
import torch

from kvboost.cache.chunk import KVChunk, Origin
from kvboost.cache.index import Index
from kvboost.cache.lookup.hits import Hit
from kvboost.cache.quantize import Quantizer, plain
from kvboost.integrations.vllm import placing
from kvboost.integrations.vllm.pages import Pages
from kvboost.integrations.vllm.placing import place, rows_of
from kvboost.integrations.vllm.planner import Load
from kvboost.reuse.plan import Plan
from kvboost.tokens.chunking import fixed
from kvboost.tokens.hashing import ChunkKey, as_token_ids
from support.made_up_pages import BLOCKS, DIM, KV_HEADS, LAYERS, PAGE, make_pages


def stored_text(rows: torch.Tensor) -> tuple[tuple[Hit, ...], list[KVChunk]]:
    """A text of these rows in chunks of 12."""
    index = Index(lambda ids, _: fixed(len(ids), 12), Origin("weights", ""), row_bytes=8)
    infos, _ = index.store(ChunkKey("00" * 16), as_token_ids(range(rows.shape[3])))
    hits = tuple(Hit(one, one.base_position, one.num_tokens) for one in infos)
    data = [plain(rows[:, :, :, hit.start : hit.end].contiguous()) for hit in hits]
    return hits, [KVChunk(one, some) for one, some in zip(infos, data, strict=True)]


def test_rows_outside_of_a_window_are_not_written() -> None:
    plain_pages = make_pages()
    caches = dict(zip("ab", plain_pages.caches, strict=True))
    # Layer 1 has a table of its own, and the third group has states.
    pages, tables = Pages(caches, plain_pages.layers, [[0], [1], []]), ((5, 1, 3), (0, 4, 2), (6,))
    nothing = pages.caches[1][0].clone()
    rows = torch.randn(2, LAYERS, KV_HEADS, 24, DIM)
    hits, chunks = stored_text(rows)
    load = Load("a", as_token_ids(range(30)), Plan(30, hits), 24, tables=tables)
    place(load, chunks, [torch.tensor(table) for table in tables], pages, Quantizer(16, None))
    for layer, (table, skipped) in enumerate(((tables[0], 0), (tables[1], PAGE))):
        found = pages.read_all(pages.slots(table, torch.arange(skipped, 24)))
        assert torch.equal(found[:, layer], rows[:, layer, :, skipped:])
    assert torch.equal(pages.caches[1][0], nothing)
    assert not pages.caches[0][6].any() and BLOCKS > 6


def test_nothing_is_written_where_all_rows_of_a_batch_are_outside_of_a_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain_pages, written = make_pages(), list[int]()
    caches = dict(zip("ab", plain_pages.caches, strict=True))
    pages, tables = Pages(caches, plain_pages.layers, [[0], [1]]), ((5, 1, 3), (0, 0, 2))
    write = pages.write

    def counted(layer: int, keys: torch.Tensor, values: torch.Tensor, slots: Any) -> None:
        written.append(len(slots))
        write(layer, keys, values, slots)

    monkeypatch.setattr(pages, "write", counted)
    monkeypatch.setattr(placing, "COPIED_ROWS", 12)
    rows = torch.randn(2, LAYERS, KV_HEADS, 24, DIM)
    hits, chunks = stored_text(rows)
    load = Load("a", as_token_ids(range(30)), Plan(30, hits), 24, tables=tables)
    place(load, chunks, [torch.tensor(table) for table in tables], pages, Quantizer(16, None))
    assert written == [12, 12, 24 - 2 * PAGE]


def test_the_rows_of_hits_follow_each_other() -> None:
    rows = torch.randn(2, LAYERS, KV_HEADS, 24, DIM)
    hits, chunks = stored_text(rows)
    some = [(hit.clip(5, 20), one.data) for hit, one in zip(hits, chunks, strict=True)]
    assert torch.equal(rows_of(some, make_pages(), Quantizer(16, None)), rows[:, :, :, 5:20])
