"""What the most used kernels compute, written out in torch.

Triton's interpreter takes its time for every kernel. Tests of what happens around kernels run these
on a CPU; on a GPU they run the kernels themselves. ``tests/model/triton`` compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import pytest
import torch

from kvboost.model.triton.adapters import Addition
from kvboost.model.triton.attention import check_query
from kvboost.model.triton.move import MovePlan, Source
from kvboost.model.triton.move import move as move_kernel
from kvboost.model.triton.pages import PagedLayers, are_joined, check_pages, halves, slots_of
from kvboost.model.triton.rows import TiledRows
from support.paged_kv import attention_weights, keys_values

USES = {
    "attend": (
        "kvboost.model.paged.batch",
        "kvboost.model.paged.step_batch",
        "kvboost.model.triton.attention",
        "kvboost.model.triton.mass",
    ),
    "write": ("kvboost.model.paged.batch", "kvboost.reuse.paged.forwards"),
    "add_norm": ("kvboost.model.paged.layers",),
    "rotate_and_write": ("kvboost.model.paged.layers",),
    "gate": ("kvboost.model.paged.layers",),
    "move": ("kvboost.model.triton.move",),
    "shrink": ("kvboost.model.paged.adapter_slots",),
    "expand": ("kvboost.model.paged.layers",),
}
"""The modules that call each of them by its name."""


def use_torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, modules in USES.items():
        for module in modules:
            monkeypatch.setattr(f"{module}.{name}", globals()[name])


def attend(
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: TiledRows,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    rotated: int | None = None,
    *,
    absent: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    page = check_pages(pages)[1]
    check_query(query, pages, rows, rotated)
    if out is None:
        out = torch.full_like(query, torch.nan, memory_format=torch.contiguous_format)
    written = out if rotated is None else out[:, :, rotated:]
    for request, start, count, room, part, *_ in rows.items.tolist():
        if part or not room:
            continue
        if count < room:  # rows that are not there
            written[(start + count) // rows.group : -(-(start + room) // rows.group)] = 0
        if not count:
            continue
        at = slice(start // rows.group, -(-(start + count) // rows.group))
        positions = rows.positions[at]
        num_keys = int(positions.max()) + 1
        table = rows.tables[request, : -(-num_keys // page)]
        keys, values = keys_values(pages, table, rotated)
        keys, values = keys[:, :num_keys], values[:, :num_keys]
        missing = None if absent is None else absent[request, :num_keys]
        weights, sums = attention_weights(
            query[at], keys, positions, scale, window, softcap, missing, sinks
        )
        values = values.float().nan_to_num().repeat_interleave(query.shape[1] // len(values), 0)
        written[at] = torch.einsum("hrk,hkd->rhd", weights, values).to(out.dtype)
        if lse is not None:
            lse[at] = sums
    return out


def write(
    keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
) -> None:
    _, page, dim = check_pages(pages)
    if are_joined(keys, values, dim):
        keys, values = halves(keys)
    is_written = slots >= 0
    slots = slots[is_written]
    pages[slots // page, :, slots % page] = torch.cat([keys, values], -1)[is_written]


def add_norm(
    rows: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    added: torch.Tensor | None = None,
    addition: Addition | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    _add_change(addition, rows, [rows.shape[1]])
    summed = rows if added is None else rows + added
    return _norm(summed, weight, eps), summed


def rotate_and_write(
    qkv: torch.Tensor,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    pages: torch.Tensor,
    slots: torch.Tensor,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
    addition: Addition | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    kv_heads, _, dim = check_pages(pages)
    heads = qkv.shape[1] // dim - 2 * kv_heads
    _add_change(addition, qkv, [heads * dim, kv_heads * dim, kv_heads * dim])
    parts = qkv.view(len(qkv), -1, dim).split((heads, kv_heads, kv_heads), 1)
    cos, sin = (part.repeat(1, dim // part.shape[1])[:, None] for part in cos_sin)
    for number, part in enumerate(parts[:2]):
        turned = part if norms is None else _norm(part, norms[number], eps)
        first, second = turned.chunk(2, -1)
        part.copy_(turned * cos + torch.cat([-second, first], -1) * sin)
    write(parts[1], parts[2], pages, slots)
    return parts[0], parts[1], parts[2]


def gate(gate_up: torch.Tensor, addition: Addition | None = None) -> torch.Tensor:
    _add_change(addition, gate_up, [gate_up.shape[1] // 2] * 2)
    gated, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gated) * up


def shrink(
    rows: torch.Tensor, slots: torch.Tensor, down: torch.Tensor, ranks: int, sums: torch.Tensor
) -> None:
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            sums[:, row] = 0.0
            sums[0, row] = down[slot] @ rows[row]


def expand(addition: Addition, out: torch.Tensor) -> None:
    _add_change(addition, out, [out.shape[1]])


def _add_change(addition: Addition | None, out: torch.Tensor, heights: Sequence[int]) -> None:
    """Adds what adapters add to the parts of ``out``."""
    if addition is None:
        return
    ranks = addition.up.shape[1]
    ends = list(accumulate(heights, initial=0))
    for row, slot in enumerate(addition.slots.tolist()):
        for part, (first, end) in enumerate(pairwise(ends)):
            if slot >= 0:
                given = addition.sums[:, row, part * ranks : (part + 1) * ranks].sum(0)
                change = given.to(out.dtype) @ addition.up[slot, :, first:end]
                out[row, first:end] += change


def move(
    rows: MovePlan,
    layers: PagedLayers,
    *,
    interleaved: bool = False,
    share: float | None = None,
) -> None:
    if share is not None:  # mixing is rare: the kernel itself does it
        move_kernel(rows, layers, interleaved=interleaved, share=share)
        return
    pairs = rows.cos_sin.shape[3]
    halves = slice(pairs), slice(pairs, 2 * pairs)
    first, second = (slice(i, 2 * pairs, 2) for i in (0, 1)) if interleaved else halves
    for source, start, count, position, rotation, pages in rows.spans:
        stored = torch.cat([_page(source, page) for page in pages], 3)
        stored = stored[:, :, :, start : start + count]
        keys, values = stored[0].clone(), stored[1]
        cos, sin = rows.cos_sin[:, :, rotation, None, None]
        keys[..., first] = stored[0][..., first] * cos - stored[0][..., second] * sin
        keys[..., second] = stored[0][..., second] * cos + stored[0][..., first] * sin
        positions = torch.arange(position, position + count, device=stored.device)
        slots = slots_of(positions, rows.table, layers.page)
        for layer, target in enumerate(layers.pages):
            write(keys[layer].transpose(0, 1), values[layer].transpose(0, 1), target, slots)


def _page(source: Source, number: int) -> torch.Tensor:
    """One of the pages of a source, whose first one is its tensor."""
    first = source.tensor
    step = source.numbers[-1] * first.stride(3)
    return first.as_strided(first.shape, first.stride(), first.storage_offset() + number * step)


def _norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = rows.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(rows.dtype)
