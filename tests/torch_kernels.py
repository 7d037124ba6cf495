"""Kernels over pages in torch, for tests of what runs around them: Triton's interpreter takes its
time. ``tests/model/triton`` compares the kernels themselves."""

from __future__ import annotations

import pytest
import torch

from kvboost.model.triton.move import MovedRows
from kvboost.model.triton.pages import PagedLayers
from kvboost.model.triton.rows import PagedRows
from paged_kv import attention_weights


def use_torch_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention, writing and moving rows. Models must have no layers of ours, nor be probed."""
    for module in ("model.paged.steps", "model.paged.batch", "model.triton.attention"):
        monkeypatch.setattr(f"kvboost.{module}.attend", attend)
    for module in ("model.paged.row_batch", "reuse.paged.forwards"):
        monkeypatch.setattr(f"kvboost.{module}.write", write)
    monkeypatch.setattr("kvboost.model.triton.move.move", move)


def attend(
    query: torch.Tensor,
    pages: torch.Tensor,
    rows: PagedRows,
    scale: float,
    *,
    window: int | None = None,
    soft_cap: float | None = None,
    absent: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    out = torch.full_like(query, float("nan")) if out is None else out
    for request, start, count in rows.tiles.tolist():
        if not count:
            continue
        own = slice(start, start + count)
        positions = rows.positions[own].long()
        end = int(positions[-1]) + 1
        table = rows.tables[request, : -(-end // pages.shape[2])].long()
        keys, values = pages[table].transpose(0, 1).flatten(1, 2)[:, :end].chunk(2, -1)
        hidden = None if absent is None else absent[request, :end]
        weights, _ = attention_weights(query[own], keys, positions, scale, window, soft_cap, hidden)
        values = values.float().repeat_interleave(query.shape[1] // len(values), 0)
        out[own] = torch.einsum("hrk,hkd->rhd", weights, values).to(out.dtype)
    return out


def write(
    keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor
) -> None:
    used = slots >= 0
    page, row = slots[used] // pages.shape[2], slots[used] % pages.shape[2]
    pages[page, :, row] = torch.cat([keys, values], -1)[used]


def move(
    rows: MovedRows,
    layers: PagedLayers,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    *,
    interleaved: bool = False,
) -> None:
    assert not interleaved
    all_slots = rows.slots.split([span.count for span in rows.spans])
    pairs = cos_sin[0].shape[2]
    for number, (span, slots) in enumerate(zip(rows.spans, all_slots, strict=True)):
        stored = span.source[:, :, :, span.start : span.start + span.count]
        keys, values = stored[0].clone(), stored[1]
        cos, sin = (part[:, number, None, None] for part in cos_sin)
        first, second = stored[0][..., :pairs], stored[0][..., pairs : 2 * pairs]
        keys[..., :pairs] = first * cos - second * sin
        keys[..., pairs : 2 * pairs] = second * cos + first * sin
        for layer, pages in enumerate(layers.pages):
            write(keys[layer].transpose(0, 1), values[layer].transpose(0, 1), pages, slots)
