"""Puts the rows of stored chunks into vLLM's pages."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvboost.cache.chunk import KVChunk
from kvboost.cache.lookup.hits import Hit
from kvboost.cache.quantize import KVData, Quantizer
from kvboost.integrations.vllm.groups import Tables, first_row
from kvboost.integrations.vllm.pages import Pages
from kvboost.integrations.vllm.planner import Load
from kvboost.integrations.vllm.taking import COPIED_ROWS, batches

if TYPE_CHECKING:
    from kvboost.reuse.paged.kernels import GpuKernels, Placed


def place(
    load: Load,
    chunks: Sequence[KVChunk],
    tables: Sequence[torch.Tensor],
    pages: Pages,
    packer: Quantizer,
    kernels: GpuKernels | None = None,
) -> None:
    """Writes the known rows of a load into the pages of ``tables``, keys of moved ones rotated, and
    mixes further copies with them."""
    device = tables[0].device
    is_here = kernels is not None and all(
        rows.device == device for one in chunks for rows in one.data.tensors.values()
    )
    rest = iter(chunks)
    groups: list[Placed] = [
        ([(hit, next(rest).data) for hit in batch], None if number == 1 else 1 / number)
        for number, hits in enumerate((load.plan.hits, *load.copies), start=1)
        for batch in batches(hits, sys.maxsize if is_here else COPIED_ROWS)
    ]
    for some in [groups] if is_here else [[group] for group in groups]:
        if kernels is not None:
            kernels.place_rows(some, tables[0])
        else:
            _place_with_torch(some, load.tables, tables, pages, packer)


def _place_with_torch(
    groups: Sequence[Placed],
    tables: Tables,
    on_device: Sequence[torch.Tensor],
    pages: Pages,
    packer: Quantizer,
) -> None:
    """``on_device`` has the ``tables``."""
    for stored, share in groups:
        positions = np.concatenate([np.arange(hit.start, hit.end) for hit, _ in stored])
        buffer = rows_of(stored, pages, packer)
        for layers, table, there in zip(pages.groups, tables, on_device, strict=True):
            if not layers:  # the group has states
                continue
            skipped = int(np.searchsorted(positions, first_row([table], pages.size)))
            if skipped == len(positions):  # a GPU cannot launch a kernel over no rows
                continue
            rows = torch.from_numpy(positions[skipped:]).to(pages.device)
            slots, new = pages.slots(there, rows), buffer[:, :, :, skipped:]
            if share is not None:  # only moved text, so there is one group
                new.lerp_(pages.read_all(slots), 1 - share)
            pages.write_layers(layers, new, slots)


def rows_of(stored: Sequence[tuple[Hit, KVData]], pages: Pages, packer: Quantizer) -> torch.Tensor:
    """The rows of hits, ``[2, layers, kv_heads, rows, head_dim]``, keys of moved ones rotated."""
    num_rows = sum(hit.num_tokens for hit, _ in stored)
    shape = (2, len(pages.caches), pages.num_kv_heads, num_rows, pages.head_dim)
    rows = torch.empty(shape, dtype=pages.dtype, device=pages.device)
    row = 0
    for hit, data in stored:
        out = rows[:, :, :, row : row + hit.num_tokens]
        packer.place(data, hit.chunk.base_position, hit.offset, hit.start, out)
        row += hit.num_tokens
    return rows
