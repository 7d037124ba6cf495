"""KV in pages of every layout, and attention over it written out in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kvboost.model.triton.rows import Tile, TiledRows
from support.interpreter import change_language_once
from support.tiny import DEVICE

change_language_once()

DTYPES = [torch.float32, torch.bfloat16]
LAYOUTS = {  # the order of [pages, kv_heads, page, 2 * dim] in memory
    "heads first": (0, 1, 2, 3),
    "tokens first": (0, 2, 1, 3),
    "pages inside": (1, 0, 2, 3),
}
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "bfloat16"])


def tile_for(dtype: torch.dtype) -> Tile:
    """Large ones where they are interpreted, which costs time for every tile. A compiler takes
    minutes for large tiles of float32."""
    if DEVICE != "cpu" and dtype == torch.float32:
        return Tile(rows=32, keys=32, warps=4, stages=1)
    return Tile(rows=64, keys=64, warps=4, stages=2)


def tiled(
    positions: Sequence[torch.Tensor],
    tables: torch.Tensor,
    query: torch.Tensor,
    pages: torch.Tensor,
    **options: Any,
) -> TiledRows:
    """The rows of ``query``, ``[rows, heads, dim]``, which attend to ``pages``."""
    return TiledRows.of(
        positions,
        tables,
        page=pages.shape[2],
        heads=query.shape[1],
        kv_heads=pages.shape[1],
        dtype=query.dtype,
        **{"tile": tile_for(query.dtype), **options},
    )


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The same numbers on every device."""
    return torch.randn(shape).to(DEVICE, dtype)


def make_pages(
    count: int, kv_heads: int, page: int, dim: int, dtype: torch.dtype, layout: str
) -> torch.Tensor:
    """Random ``[pages, kv_heads, page, 2 * dim]``, strided as in ``layout``, inside a larger
    tensor."""
    order = LAYOUTS[layout]
    shape = (count, kv_heads, page, 2 * dim)
    data = random(*(shape[axis] for axis in order[:3]), 2 * dim + 16, dtype=dtype)
    return data[..., : 2 * dim].permute(*(order.index(axis) for axis in range(4)))


def make_tables(requests: int, pages: int, count: int) -> torch.Tensor:
    """Tables of ``pages`` pages each, from ``count``, none of them twice."""
    order = torch.randperm(count)[: requests * pages]
    return order.view(requests, pages).to(DEVICE, torch.int32)


def scattered(count: int, end: int) -> torch.Tensor:
    """``count`` ascending positions, the last of them ``end - 1``."""
    others = torch.randperm(end - 1)[: count - 1]
    return torch.cat([others, torch.tensor([end - 1])]).sort().values


def dense(pages: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """A request's KV as ``[2, kv_heads, rows, dim]``."""
    rows = pages[table.long()].transpose(0, 1).flatten(1, 2)
    return torch.stack(rows.chunk(2, -1))


def keys_values(
    pages: torch.Tensor, table: torch.Tensor, rotated: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A request's keys and values, ``[kv_heads, rows, dim]``; as ``attend`` understands
    ``rotated``."""
    if rotated is None:
        keys, values = dense(pages, table)
        return keys, values
    rows = pages[table.long()].transpose(0, 1).flatten(1, 2)
    return rows, rows[..., rotated:]


def attention_weights(
    query: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    absent: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights ``[heads, rows, keys]`` of ``query``, ``[rows, heads, dim]``, over ``keys``,
    ``[kv_heads, keys, dim]``, and the logarithms of the sums, ``[rows, heads]``. ``sinks`` are one
    more key's scores, whose weights are left out."""
    keys = keys.float().repeat_interleave(query.shape[1] // len(keys), 0)
    scores = torch.einsum("rhd,hkd->hrk", query.float(), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    key, row = torch.arange(keys.shape[1], device=keys.device), positions.to(keys.device)[:, None]
    hidden = key > row
    if window is not None:
        hidden |= key <= row - window
    if absent is not None:
        hidden = hidden | absent[: keys.shape[1]]
    scores = scores.masked_fill(hidden, float("-inf"))
    if sinks is None:
        return scores.softmax(-1), scores.logsumexp(-1).T
    last = sinks.float()[:, None, None].expand(-1, len(query), 1)
    scores = torch.cat([scores, last], -1)
    return scores.softmax(-1)[..., :-1], scores.logsumexp(-1).T


def attention(
    query: torch.Tensor,
    pages: torch.Tensor,
    positions: Sequence[torch.Tensor],
    tables: torch.Tensor,
    scale: float,
    absent: torch.Tensor | None = None,
    rotated: int | None = None,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``attend`` computes, in float32, and the logarithms of the sums; with ``rotated``, the
    channels that it writes."""
    out, sums, start = [], [], 0
    for number, rows in enumerate(positions):
        keys, values = keys_values(pages, tables[number], rotated)
        own = query[start : start + len(rows)]
        start += len(rows)
        missing = None if absent is None else absent[number]
        weights, lse = attention_weights(own, keys, rows, scale, absent=missing, **options)  # type: ignore[arg-type]
        values = values.float().nan_to_num().repeat_interleave(query.shape[1] // len(values), 0)
        out.append(torch.einsum("hrk,hkd->rhd", weights, values))
        sums.append(lse)
    return torch.cat(out), torch.cat(sums)
