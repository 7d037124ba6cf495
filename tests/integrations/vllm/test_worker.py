"""The workers' side of the connector, without vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvboost.cache.chunk import ChunkInfo, Origin
from kvboost.cache.index import Index
from kvboost.cache.quantize import PLAIN
from kvboost.integrations.vllm.options import Options
from kvboost.integrations.vllm.planner import Keep
from kvboost.model import triton
from kvboost.tokens.chunking import fixed
from kvboost.tokens.hashing import ChunkKey, as_token_ids
from support.connectors import connector
from support.made_up_pages import BLOCKS, DIM, KV_HEADS, LAYERS, PAGE, make_pages

__all__ = ["connector"]


def infos_of(seed: int, length: int) -> tuple[ChunkInfo, ...]:
    """Chunks of 12 rows, so that pages are shared by two of them."""
    index = Index(lambda ids, _: fixed(len(ids), 12), Origin("weights", ""), row_bytes=8)
    ids = as_token_ids(range(seed, seed + length))
    return tuple(index.store(ChunkKey("00" * 16), ids)[0])


def make_worker(connector: Any, *, kernels: bool) -> tuple[Any, dict[ChunkKey, torch.Tensor]]:
    """A worker over pages of random rows, and the rows that it has kept."""
    kept: dict[ChunkKey, torch.Tensor] = {}

    def put(chunks: list[Any]) -> None:
        kept.update({chunk.key: chunk.data.tensors[PLAIN] for chunk in chunks})

    worker = connector.Worker(None, Options.parse({}), None)
    pages = worker._pages = make_pages()
    pages.write_all(
        torch.randn(2, LAYERS, KV_HEADS, BLOCKS * PAGE, DIM), torch.arange(BLOCKS * PAGE)
    )
    worker._data = SimpleNamespace(put=put)
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
    keeps = [Keep(first[1:], (5, 1, 3, 2)), Keep(second, (6, 4))]
    rows = [
        worker._pages.read_all(
            worker._pages.slots(keep.pages, torch.arange(len(keep.pages) * PAGE))
        )
        for keep in keeps
    ]
    worker.keep(keeps)
    for cache in worker._pages.caches:
        cache.zero_()  # the step writes to the pages
    worker._thread.shutdown()
    assert kept.keys() == {info.key for keep in keeps for info in keep.infos}
    for keep, expected in zip(keeps, rows, strict=True):
        for info in keep.infos:
            found = kept[info.key]
            assert found.is_contiguous()
            assert torch.equal(found, expected[:, :, :, info.base_position : info.end])


def test_rows_for_which_there_is_no_memory_are_gone(
    connector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, kept = make_worker(connector, kernels=False)

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(worker._pages, "copy", full)
    infos = infos_of(0, 31)
    worker.keep([Keep(infos, (5, 1, 3, 2))])
    worker._thread.shutdown()
    assert not kept and worker._report.gone == {info.key for info in infos}
