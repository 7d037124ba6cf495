"""Rows of requests, cut into the tiles that programs compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

MOST_SPLITS = 32
KEYS_PER_SPLIT = 512
"""A split with fewer keys than this costs more than it gains."""


@dataclass(frozen=True)
class Tile:
    """What one program computes at a time: ``rows`` rows times heads, and ``keys`` keys."""

    rows: int
    keys: int
    warps: int
    stages: int

    def whole(self, num_rows: int, group: int) -> int:
        """The most rows up to ``num_rows`` that leave no tile in part empty, if one takes fewer;
        ``group`` query heads share a KV head."""
        each = self.rows // group
        return num_rows if num_rows < each else num_rows - num_rows % each

    @classmethod
    def pick(cls, num_rows: int, dtype: torch.dtype, dim: int = 128) -> Tile:
        """The tile for requests of up to ``num_rows`` rows times heads that share a KV head."""
        tiles = tiles_of(dtype, dim)
        return next((tile for tile in tiles if num_rows <= tile.rows), tiles[-1])


def tiles_of(dtype: torch.dtype, dim: int = 128) -> list[Tile]:
    """All tiles that are picked for heads of dimension ``dim``, for few rows first."""
    if dim > 128:  # larger tiles would not fit the memory that programs share
        stages = 1 if dtype == torch.float32 else 2
        return [Tile(16, 32, 4, stages), Tile(32 if dtype == torch.float32 else 64, 32, 4, stages)]
    if dtype == torch.float32:  # it is multiplied without tensor cores
        return [Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)]
    return [Tile(16, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)]


@dataclass(frozen=True)
class PagedRows:
    """Rows of one or more requests, in the order of their queries; the same in all layers."""

    positions: torch.Tensor
    """int32 ``[rows]``, ascending within a request."""
    tiles: torch.Tensor
    """int32 ``[tiles, 3]``: request, first row and number of rows."""
    tables: torch.Tensor
    """int32 ``[requests, pages]``: the pages of each request, in order."""
    tile: Tile
    splits: int
    end: int
    """One past the last position."""
    group: int
    """Query heads that share a KV head."""

    @classmethod
    def of(
        cls,
        positions: Sequence[torch.Tensor],
        tables: torch.Tensor,
        *,
        page: int,
        heads: int,
        kv_heads: int,
        dtype: torch.dtype,
        tile: Tile | None = None,
        splits: int | None = None,
        starts: Sequence[int] | None = None,
    ) -> PagedRows:
        """``positions`` are the rows of each request, on the CPU; request ``i`` has the pages
        ``tables[i]``. Its queries begin at ``starts[i]``, or follow those of the request before."""
        group = heads // kv_heads
        counts = [len(rows) for rows in positions]
        tile = tile or Tile.pick(group * max(counts), dtype)
        in_tile = tile.rows // group
        if heads % kv_heads or not in_tile:
            raise ValueError(
                f"{heads} heads over {kv_heads} KV heads do not fit tiles of {tile.rows} rows"
            )
        _check_positions(positions, tables, page)
        starts = starts or list(accumulate(counts[:-1], initial=0))
        every = torch.zeros(starts[-1] + counts[-1], dtype=torch.int32)
        for start, rows in zip(starts, positions, strict=True):
            every[start : start + len(rows)] = rows
        tiles = [
            (request, start + at, min(in_tile, count - at))
            for request, (start, count) in enumerate(zip(starts, counts, strict=True))
            for at in range(0, count, in_tile)
        ]
        last = every[[first + count - 1 for _, first, count in tiles]]
        order = last.argsort(descending=True)  # the longest first: short ones fill the end
        longest = int(last.max()) + 1
        described = torch.tensor(tiles, dtype=torch.int32)[order]
        device = tables.device
        splits = splits or pick_splits(last + 1, kv_heads, programs_at_once(device, tile))
        sent = torch.cat([described.flatten(), every]).to(device, non_blocking=True)
        on_device = sent[described.numel() :], sent[: described.numel()].view(-1, 3)
        return cls(*on_device, tables.to(torch.int32), tile, splits, longest, group)


def _check_positions(positions: Sequence[torch.Tensor], tables: torch.Tensor, page: int) -> None:
    if len(positions) > len(tables):
        raise ValueError(f"{len(positions)} requests have {len(tables)} tables of pages")
    most = tables.shape[1] * page
    for number, rows in enumerate(positions):
        if not len(rows) or not bool((rows[1:] > rows[:-1]).all()):
            raise ValueError(
                f"request {number} has positions {rows.tolist()[:9]}; there must be some, ascending"
            )
        if int(rows[0]) < 0 or int(rows[-1]) >= most:
            raise ValueError(
                f"request {number} has positions {int(rows[0])} to {int(rows[-1])}; "
                f"its table of {tables.shape[1]} pages of {page} rows ends at {most}"
            )


def pick_splits(ends: torch.Tensor, kv_heads: int, at_once: int) -> int:
    """How many programs share the keys of a tile, if tiles have keys up to ``ends`` and ``at_once``
    programs run at a time: no more than let the longest end with all of them together, and fewer if
    the last of more would begin when the others have ended."""
    shortest, longest = int(ends.min()), int(ends.max())
    total, tiles = int(ends.sum()) * kv_heads, len(ends) * kv_heads
    wanted = -(-longest * at_once // total)
    most = max(1, min(wanted, longest // KEYS_PER_SPLIT, MOST_SPLITS))

    def keys_until_done(splits: int) -> float:
        if tiles * splits <= at_once:
            return longest / splits
        return max(longest / splits, total / at_once + shortest / splits)

    return min(range(1, most + 1), key=keys_until_done)


def programs_at_once(device: torch.device, tile: Tile) -> int:
    """How many programs of this tile a device runs at a time."""
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return processors * max(1, 8 // tile.warps)
