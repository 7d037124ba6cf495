"""The workers' side of the connector, without vLLM."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvboost.cache.chunk import ChunkInfo, KVChunk, Origin
from kvboost.cache.data import ChunkData
from kvboost.cache.index import Index
from kvboost.cache.lookup.hits import Hit
from kvboost.cache.mixed import states_of, with_states
from kvboost.cache.quantize import PLAIN, Quantizer, plain
from kvboost.cache.tiers.open import open_tiers
from kvboost.config import EngineConfig
from kvboost.integrations.vllm.groups import Groups
from kvboost.integrations.vllm.options import Options
from kvboost.integrations.vllm.pages import Pages
from kvboost.integrations.vllm.planner import Keep, Load
from kvboost.integrations.vllm.states import StatePages
from kvboost.model import triton
from kvboost.reuse.plan import Plan
from kvboost.tokens.chunking import fixed
from kvboost.tokens.hashing import ChunkKey, as_token_ids
from support.connectors import Base, Full, Role, connector
from support.made_up_pages import BLOCKS, DIM, KV_HEADS, LAYERS, PAGE, make_pages

__all__ = ["connector"]


def infos_of(seed: int, length: int) -> tuple[ChunkInfo, ...]:
    """Chunks of 12 rows, so that pages are shared by two of them."""
    index = Index(lambda ids, _: fixed(len(ids), 12), Origin("weights", ""), row_bytes=8)
    ids = as_token_ids(range(seed, seed + length))
    return tuple(index.store(ChunkKey("00" * 16), ids)[0])


def hits_of(infos: Sequence[ChunkInfo]) -> tuple[Hit, ...]:
    return tuple(Hit(info, info.base_position, info.num_tokens) for info in infos)


def make_worker(connector: Any, *, kernels: bool) -> tuple[Any, dict[ChunkKey, torch.Tensor]]:
    """A worker over pages of random rows, and the rows that it has kept."""
    kept: dict[ChunkKey, torch.Tensor] = {}

    def put(chunks: list[Any]) -> None:
        kept.update({chunk.key: chunk.data.tensors[PLAIN] for chunk in chunks})

    worker = connector.Worker(None, Options.parse({}), None, Groups((None,), ((),)))
    pages = worker.pages = make_pages()
    pages.write_all(
        torch.randn(2, LAYERS, KV_HEADS, BLOCKS * PAGE, DIM), torch.arange(BLOCKS * PAGE)
    )
    worker.data = SimpleNamespace(put=put)
    if kernels:
        if not triton.is_available():
            pytest.skip("triton is not installed")
        from kvboost.reuse.paged.kernels import GpuKernels

        worker._kernels = GpuKernels(pages, None)
    return worker, kept


@pytest.mark.parametrize("kernels", [False, True])
def test_rows_are_kept_as_they_were_when_the_step_began(connector: Any, kernels: bool) -> None:
    worker, kept = make_worker(connector, kernels=kernels)
    first, second = infos_of(0, 31), infos_of(100, 16)
    keeps = [Keep(first[1:], ((5, 1, 3, 2),)), Keep(second, ((6, 4),))]
    rows = [
        worker.pages.read_all(
            worker.pages.slots(keep.tables[0], torch.arange(len(keep.tables[0]) * PAGE))
        )
        for keep in keeps
    ]
    worker.keep(keeps)
    for cache in worker.pages.caches:
        cache.zero_()  # the step writes to the pages
    worker.thread.shutdown()
    assert kept.keys() == {info.key for keep in keeps for info in keep.infos}
    for keep, expected in zip(keeps, rows, strict=True):
        for info in keep.infos:
            found = kept[info.key]
            assert found.is_contiguous()
            assert torch.equal(found, expected[:, :, :, info.base_position : info.end])


def test_vllm_has_nothing_to_call_in_every_layer(connector: Any) -> None:
    worker, kept = make_worker(connector, kernels=False)
    ours = connector.KVBoostConnector.__new__(connector.KVBoostConnector)
    Base.__init__(ours, None, Role.WORKER, None)
    ours.worker, ours.groups = worker, worker.groups
    ours.bind_connector_metadata(connector.Step(keeps=[Keep(infos_of(0, 31), ((5, 1, 3, 2),))]))
    assert not ours.has_connector_metadata()
    assert ours.get_finished(set()) == (None, None)
    worker.thread.shutdown()
    assert len(kept) == 3


def test_rows_for_which_there_is_no_memory_are_gone(
    connector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, kept = make_worker(connector, kernels=False)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(worker.pages, "copy", full)
    infos = infos_of(0, 31)
    worker.keep([Keep(infos, ((5, 1, 3, 2),))])
    worker.thread.shutdown()
    assert not kept and worker.report.gone == {info.key for info in infos}


@pytest.mark.parametrize("split", [1, 2])
def test_nothing_is_reused_where_the_attention_kernel_splits_pages(
    connector: Any, monkeypatch: pytest.MonkeyPatch, split: int
) -> None:
    """Loads would write into the pages of other requests."""
    module = sys.modules[connector.Worker.__module__]
    monkeypatch.setattr(module, "find_runner", lambda: None)
    pages = make_pages()
    layers = {f"layers.{number}": layer for number, layer in enumerate(pages.layers)}
    group = SimpleNamespace(layer_names=list(layers), kv_cache_spec=Full(split * PAGE))
    groups = Groups.of(SimpleNamespace(kv_cache_groups=[group]))  # type: ignore[arg-type]
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    worker = connector.Worker(config, Options.parse({}), None, groups)
    worker.register(dict(zip(layers, pages.caches, strict=True)))
    assert (worker.pages is None) == (split > 1)
    assert (f"kernel pages of {PAGE}" in worker.problem) == (split > 1)


def test_what_the_tiers_hold_is_told_when_it_has_changed(connector: Any) -> None:
    worker, _ = make_worker(connector, kernels=False)
    worker.config = SimpleNamespace(parallel_config=SimpleNamespace(rank=1))
    tiers = open_tiers(EngineConfig(max_cache_bytes=1 << 20), torch.device("cpu"))
    worker.data = ChunkData(tiers)
    assert worker.take_report().tiers[1]["ram"].chunks == 0
    assert worker.take_report() is None
    worker.keep([Keep(infos_of(0, 31), ((5, 1, 3, 2),))])
    worker.thread.shutdown()
    assert worker.take_report().tiers[1]["ram"].chunks == 3
    assert worker.take_report() is None
    worker.data.close()


# Several groups of layers.


def two_groups(worker: Any) -> Any:
    """Layer 1 has a table of its own."""
    caches = dict(zip(("layers.0", "layers.1"), worker.pages.caches, strict=True))
    worker.pages = Pages(caches, worker.pages.layers, [[0], [1]])
    worker.packer = Quantizer(16, None)
    return worker.pages


def rows_of(pages: Any, tables: tuple[tuple[int, ...], ...], rows: int) -> torch.Tensor:
    """The first rows of a request, as chunks have them."""
    return torch.cat(
        [
            pages.read_all(pages.slots(table, torch.arange(rows)))[:, layer : layer + 1]
            for layer, table in enumerate(tables)
        ],
        dim=1,
    )


def test_rows_that_have_left_their_pages_are_taken_from_earlier_chunks(connector: Any) -> None:
    worker, kept = make_worker(connector, kernels=False)
    pages, tables = two_groups(worker), ((5, 1, 3, 2), (6, 4, 2, 1))
    expected = rows_of(pages, tables, 31)
    (early,) = infos_of(0, 9)
    stored = KVChunk(early, plain(expected[:, :, :, :9].contiguous()))
    worker.data.fetch = lambda infos: [stored] if infos == [early] else None
    pages.caches[1][6] = 0  # rows 0 to 7 of layer 1 have left the window
    infos = infos_of(0, 31)
    worker.keep([Keep(infos, tables, 8, (Hit(early, 0, 8),))])
    worker.thread.shutdown()
    for info in infos:
        found = kept[info.key]
        assert torch.equal(found, expected[:, :, :, info.base_position : info.end])


def test_chunks_whose_earlier_rows_are_lost_are_not_kept(connector: Any) -> None:
    worker, kept = make_worker(connector, kernels=False)
    two_groups(worker)
    refused: list[ChunkKey] = []
    worker.data.fetch = lambda infos: None
    worker.data.refuse = refused.extend
    (early,) = infos_of(0, 9)
    infos = infos_of(0, 31)
    worker.keep([Keep(infos, ((5, 1, 3, 2), (6, 4, 2, 1)), 8, (Hit(early, 0, 8),))])
    worker.thread.shutdown()
    assert not kept and refused == [info.key for info in infos]


def test_chunks_are_held_until_there_are_pages(connector: Any) -> None:
    worker, _ = make_worker(connector, kernels=False)
    two_groups(worker)
    worker.ranks = SimpleNamespace(least=lambda number: number)
    infos = infos_of(0, 24)
    chunks = [KVChunk(one, plain(torch.ones(2, LAYERS, KV_HEADS, 12, DIM))) for one in infos]
    worker.data.at_hand = lambda planned: chunks if planned[0].base_position == 0 else None
    worker.data.fetch = lambda planned: None
    hits = hits_of(infos)
    ids = as_token_ids(range(30))
    found, lost = (
        Load("found", ids, Plan(30, hits), 24),
        Load("lost", ids, Plan(30, hits[1:], (), 12), 24),
    )
    said = connector.Report()
    assert worker.step(connector.Step(fetches=[found, lost])) == set()
    while not (said.fetched and said.failed):
        worker.step(connector.Step())
        if (more := worker_report(worker)) is not None:
            said = said.aggregate(more)
    assert said.fetched == {("found", 0)} and said.failed == {("lost", 12)}
    load = replace(found, tables=((5, 1, 3), (6, 4, 2)))
    assert worker.step(connector.Step(loads=[load])) == {"found"}
    assert (rows_of(worker.pages, load.tables, 24) == 1).all() and not worker.held
    assert not worker.take_failed_pages()
    worker.thread.shutdown()


def worker_report(worker: Any) -> Any:
    """The report so far; the tiers are not asked."""
    report, worker.report = worker.report, type(worker.report)()
    return report


# Layers with states.


def with_states_beside(worker: Any) -> list[torch.Tensor]:
    """The second group has states, ``[pages, 3]`` in each of two layers."""
    pages = worker.pages
    caches = dict(zip(("layers.0", "layers.1"), pages.caches, strict=True))
    worker.pages = Pages(caches, pages.layers, [[0, 1], []])
    worker.packer = Quantizer(16, None)
    worker.ranks = SimpleNamespace(least=lambda number: number)
    layers = [torch.randn(BLOCKS, 3) for _ in range(2)]
    worker.states = StatePages([(1, [one]) for one in layers])
    return layers


def stateful(seed: int, length: int) -> tuple[ChunkInfo, ...]:
    """Chunks of which the last is stored with states."""
    *others, last = infos_of(seed, length)
    return *others, replace(last, has_state=True)


def test_states_are_kept_as_the_step_leaves_them(connector: Any) -> None:
    worker, _ = make_worker(connector, kernels=False)
    layers = with_states_beside(worker)
    done: list[tuple[str, Any]] = []
    worker.data.put = lambda chunks: done.append(("put", chunks))
    worker.data.drop = lambda keys: done.append(("drop", keys))
    infos, tables = stateful(0, 24), ((5, 1, 3), (0, 0, 2))
    expected = rows_of(worker.pages, tables[:1] * 2, 24)
    worker.step(connector.Step(keeps=[Keep(infos, tables)], dropped=[infos[-1].key]))
    states = torch.stack([one[2] for one in layers])
    for one in (*worker.pages.caches, *layers):
        one.zero_()  # the next step
    worker.thread.shutdown()
    (_, dropped), (_, chunks) = done  # in this order: it is the same chunk, without states
    assert dropped == [infos[-1].key] and [one.key for one in chunks] == [i.key for i in infos]
    for chunk in chunks:
        found = chunk.data.tensors[PLAIN]
        assert torch.equal(found, expected[:, :, :, chunk.info.base_position : chunk.info.end])
        assert chunk.nbytes == chunk.data.nbytes
    assert not states_of(chunks[0].data)
    (found,) = states_of(chunks[-1].data)
    assert torch.equal(found, states)


@pytest.mark.parametrize("is_whole", [True, False])
def test_a_load_brings_the_states_at_its_end(connector: Any, is_whole: bool) -> None:
    worker, _ = make_worker(connector, kernels=False)
    layers = with_states_beside(worker)
    infos, rows = stateful(0, 24), plain(torch.ones(2, LAYERS, KV_HEADS, 12, DIM))
    chunks = [KVChunk(one, rows) for one in infos]
    if is_whole:
        chunks[-1] = KVChunk(infos[-1], with_states(rows, [torch.ones(2, 3)]))
    dropped: list[ChunkKey] = []
    worker.data.at_hand = lambda planned: chunks
    worker.data.drop = dropped.extend
    hits = hits_of(infos)
    load = Load("a", as_token_ids(range(30)), Plan(30, hits), 24, tables=((5, 1, 3), (0, 0, 2)))
    before = [one.clone() for one in layers]
    worker.step(connector.Step(fetches=[load]))
    if not is_whole:  # another process has stored the last chunk without states
        worker.thread.shutdown()
        assert dropped == [infos[-1].key] and worker.report.gone == {infos[-1].key}
        assert worker.report.failed == {("a", 0)}
        return
    assert worker.step(connector.Step(loads=[load])) == {"a"}
    assert (rows_of(worker.pages, ((5, 1, 3),) * 2, 24) == 1).all()
    for one, then in zip(layers, before, strict=True):
        then[2] = 1
        assert torch.equal(one, then)
    worker.thread.shutdown()


def test_states_on_the_way_are_let_go(connector: Any) -> None:
    worker, _ = make_worker(connector, kernels=False)
    with_states_beside(worker)
    infos = [replace(one, has_state=True) for one in infos_of(0, 24)]
    data = with_states(plain(torch.ones(2, LAYERS, KV_HEADS, 12, DIM)), [torch.ones(2, 3)])
    worker.data.at_hand = lambda planned: None
    worker.data.fetch = lambda planned: [KVChunk(one, data) for one in infos]
    hits = hits_of(infos)
    while "a" not in worker.held:
        worker.step(
            connector.Step(fetches=[Load("a", as_token_ids(range(30)), Plan(30, hits), 24)])
        )
    first, last = worker.held["a"]
    assert not states_of(first.data) and len(states_of(last.data)) == 1
    worker.thread.shutdown()


def test_layers_of_one_number_are_in_the_order_of_their_names(connector: Any) -> None:
    """As in models whose draft layers count from 0 again: each rank must find the same order."""
    names = tuple(f"{at}.mixer" for at in ("model.1", "model.10", "draft.1", "model.2"))
    groups = Groups((None, None), (("model.0.attn",), names), with_states=(1,))
    worker = connector.Worker(None, Options.parse({}), None, groups)
    layers = {
        name: SimpleNamespace(kv_cache=[torch.full((BLOCKS, 2), float(number))])
        for number, name in enumerate(names)
    }
    (found,) = worker._find_states(layers).read(((), (3,)), 0)
    assert found[:, 0].tolist() == [2, 0, 3, 1]
