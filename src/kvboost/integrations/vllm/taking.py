"""Copies of new rows out of vLLM's pages, for chunks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch

from kvboost.cache.chunk import ChunkInfo, KVChunk
from kvboost.cache.lookup.hits import Hit
from kvboost.cache.mixed import with_states
from kvboost.cache.quantize import plain
from kvboost.integrations.vllm.pages import Pages
from kvboost.integrations.vllm.planner import Keep
from kvboost.model.triton.host import to_device

if TYPE_CHECKING:
    from kvboost.reuse.paged.kernels import GpuKernels

COPIED_ROWS = 4096
"""Rows that go into pages or out of them together, where a copy of them is made on the device."""

Some = TypeVar("Some", Hit, ChunkInfo)
Taken = tuple[Sequence[ChunkInfo], "Callable[[], list[torch.Tensor]]", "list[torch.Tensor]"]
"""Chunks that follow each other, what gives their rows, in the worker's thread, and the states
after the last of them if they are to be stored."""


def chunks_of(
    infos: Sequence[ChunkInfo], rows: Sequence[torch.Tensor], states: Sequence[torch.Tensor]
) -> list[KVChunk]:
    """The same ``infos`` where they say the right sizes: plans that name them need not be
    compared."""
    data = list(map(plain, rows))
    data[-1] = with_states(data[-1], states)
    return [
        KVChunk(info if info.nbytes == one.nbytes else replace(info, nbytes=one.nbytes), one)
        for info, one in zip(infos, data, strict=True)
    ]


def take_together(kernels: GpuKernels, keeps: Sequence[Keep]) -> list[Taken]:
    """Copies all rows in one launch, into the chunks."""
    size, table = kernels.pages.size, list[int]()
    spans: list[tuple[int, int]] = []
    for keep in keeps:
        pages = pages_of(keep.infos, size)
        before = (len(table) - pages.start) * size
        spans += [(before + info.base_position, info.num_tokens) for info in keep.infos]
        table += keep.tables[0][pages]
    rows = iter(kernels.take_rows(spans, table))
    return [
        (infos, partial(list, [next(rows) for _ in infos]), [])
        for keep in keeps
        for infos in batches(keep.infos, COPIED_ROWS)
    ]


def copied(pages: Pages, keep: Keep, infos: Sequence[ChunkInfo]) -> torch.Tensor:
    """The pages of chunks of a request, as far as their rows are in pages."""
    some = pages_of(infos, pages.size, keep.first)
    return pages.copy([to_device(table[some], torch.int64, pages.device) for table in keep.tables])


def pages_of(infos: Sequence[ChunkInfo], size: int, first: int = 0) -> slice:
    """Which pages of a sequence hold these chunks, which follow each other, from row ``first``
    on."""
    end = infos[-1].end
    return slice(min(max(infos[0].base_position, first), end) // size, -(-end // size))


def batches(pieces: Sequence[Some], most_rows: int) -> list[list[Some]]:
    """``pieces`` in order, so that those of one batch have at most ``most_rows`` rows together."""
    batches: list[list[Some]] = []
    rows = 0
    for piece in pieces:
        if not batches or rows + piece.num_tokens > most_rows:
            batches.append([])
            rows = 0
        batches[-1].append(piece)
        rows += piece.num_tokens
    return batches
