"""Rows of requests, cut into the tiles and parts of tiles that programs compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

import numpy as np
import torch

from kvboost.model.triton.pages import check_pages

Ints = np.ndarray[Any, np.dtype[np.int32]]
Floats = np.ndarray[Any, np.dtype[np.float64]]

FEW_ROWS = 16
"""Of the smallest tile: that of decode steps."""
MOST_PARTS = 32
KEYS_PER_PART = 192
"""A part with fewer keys than this costs more than it gains."""
PART_COST, COMBINING_COST = 320, 224
"""The costs of writing a part, and of combining all parts, in keys."""
MASKED_COST = 4
"""Keys that only some rows of a tile see take longer than others: for four of them, as long as
five."""
SHORT_PARTS = 4
"""Parts that are shorter by this factor than what a program does in all are short enough."""
LEAST_DENSE = 3072
"""Rows times heads that share a KV head, from which on copying keys takes less than it saves."""
ITEM_FIELDS = ("request", "start", "count", "room", "part", "parts", "slot")
"""Of a part of a tile. Rows are counted times the heads that share a KV head. ``room`` are those
that it may write; ``slot`` is where one of several parts goes."""
TILE_FIELDS = ("start", "room", "slot", "parts")


@dataclass(frozen=True)
class Tile:
    """The work of one program at a time: ``rows`` rows times heads, and ``keys`` keys. How it
    ``reads`` keys and values: row by row, a page at a time, or from copies in one piece each. The
    latter two are for Hopper's units for copying tiles, which need no registers."""

    rows: int
    keys: int
    warps: int
    stages: int
    reads: Literal["rows", "pages", "piece"] = "rows"

    def whole(self, num_rows: int, group: int) -> int:
        """The most of ``num_rows`` rows that fill whole tiles, or all if they do not fill one: a
        tile that is not full takes as long as a full one. ``group`` query heads share a KV head."""
        tiles = num_rows * group // self.rows
        return tiles * self.rows // group if tiles else num_rows

    @classmethod
    def pick(cls, num_rows: int, dtype: torch.dtype, dim: int = 128) -> Tile:
        """The tile for requests of up to ``num_rows`` rows times heads that share a KV head."""
        tiles = tiles_of(dtype, dim)
        return next((tile for tile in tiles if num_rows <= tile.rows), tiles[-1])

    @classmethod
    def over(cls, pages: torch.Tensor, num_rows: int) -> Tile:
        """The tile for as many rows over the ``pages`` of a layer, ``[pages, kv_heads, page, 2 *
        dim]``."""
        _, page, dim = check_pages(pages)
        tile = cls.pick(num_rows, pages.dtype, dim)
        can_copy = copies_tiles(pages.device, pages.dtype, dim) and pages.is_contiguous()
        if tile.rows == FEW_ROWS or not can_copy or page != COPIED[dim].keys:
            return tile
        return replace(COPIED[dim], reads="pages")


def tiles_of(dtype: torch.dtype, dim: int = 128) -> list[Tile]:
    """All tiles that are picked for heads of dimension ``dim``, for few rows first."""
    if dim > 256:  # latents, whose results are as wide as whole rows
        if dtype == torch.float32:  # a compiler takes half a minute for this one
            return [Tile(FEW_ROWS, 16, 4, 1)]
        return [Tile(FEW_ROWS, 32, 4, 2), Tile(64, 32, 8, 2)]
    if dim > 128:  # larger tiles would not fit the memory that programs share
        stages = 1 if dtype == torch.float32 else 2
        return [
            Tile(FEW_ROWS, 32, 4, stages),
            Tile(32 if dtype == torch.float32 else 64, 32, 4, stages),
        ]
    if dtype == torch.float32:  # it is multiplied without tensor cores
        return [Tile(FEW_ROWS, 32, 4, 1), Tile(32, 16, 4, 1)]
    return [Tile(FEW_ROWS, 64, 4, 3), Tile(64, 64, 4, 3), Tile(128, 64, 8, 3)]


HALF_LATENT = 288
"""The dimension of the most usual latents, as kernels that move rows see them: 64 channels rotate,
512 do not."""
COPIED = {
    **dict.fromkeys((64, 128), Tile(64, 64, 4, 3)),
    HALF_LATENT: Tile(64, 64, 8, 2),
}
"""For keys of some dimensions, which Hopper's units copy. Measured for all but latents: programs of
one warp group, two of them on a processor, so that one computes products while the other computes
exponentials."""


def copies_tiles(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether a tile of ``COPIED`` serves best."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
    return is_hopper and dtype.itemsize == 2 and dim in COPIED


def dense_tile(device: torch.device, dtype: torch.dtype, dim: int, num_rows: int) -> Tile | None:
    """The tile for ``num_rows`` rows times heads that share a KV head, if the keys of their request
    are better copied into one piece."""
    can_copy = num_rows >= LEAST_DENSE and copies_tiles(device, dtype, dim)
    return replace(COPIED[dim], reads="piece") if can_copy else None


@dataclass(frozen=True)
class TiledRows:
    """Rows of one or more requests, in the order of their queries; the same in all layers."""

    positions: torch.Tensor
    """int32 ``[rows]``, ascending within a request."""
    items: torch.Tensor
    """int32 ``[items, ITEM_FIELDS]``: what programs compute, the longest first. Those without room
    are padding."""
    tiles: torch.Tensor
    """int32 ``[tiles, TILE_FIELDS]``."""
    tables: torch.Tensor
    """int32 ``[requests, pages]``: the pages of each request, in order."""
    tile: Tile
    most_parts: int
    """The most parts of a tile."""
    slots: int
    """The most parts that there are of tiles in several parts."""
    end: int
    """One past the last position."""
    group: int
    """Query heads that share a KV head."""
    num_keys: torch.Tensor | None = None
    """One past the last position, int32 ``[1]``, if these are rows of one request."""

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
        parts: int | None = None,
        starts: Sequence[int] | None = None,
    ) -> TiledRows:
        """``positions`` are the rows of each request, on the CPU; request ``i`` has the pages
        ``tables[i]``. Its queries begin at ``starts[i]``, or follow those of the request before.
        ``parts``: of every tile, instead of as many as serve best. A ``tile`` that reads keys in
        one piece serves one request."""
        group = heads // kv_heads
        counts = [len(rows) for rows in positions]
        tile = tile or Tile.pick(group * max(counts), dtype)
        if heads % kv_heads:
            raise ValueError(f"{heads} heads over {kv_heads} KV heads: all must have as many")
        _check_positions(positions, tables, page)
        starts = starts or list(accumulate(counts[:-1], initial=0))
        every = np.zeros(starts[-1] + counts[-1], np.int32)
        for start, rows in zip(starts, positions, strict=True):
            every[start : start + len(rows)] = rows.numpy()
        tiles = np.array(
            [
                (request, start * group + at, *[min(tile.rows, count * group - at)] * 2)
                for request, (start, count) in enumerate(zip(starts, counts, strict=True))
                for at in range(0, count * group, tile.rows)
            ],
            np.int32,
        )
        last = every[(tiles[:, 1] + tiles[:, 2] - 1) // group]
        keys = keys_of(every[tiles[:, 1] // group], last)
        device = tables.device
        of_tiles = np.full_like(keys, parts or 1)
        if parts is None:
            of_tiles = pick_parts(keys, kv_heads, programs_at_once(device, tile))
        items, described = cut(tiles, keys, of_tiles)
        longest = int(last.max()) + 1
        sent = torch.from_numpy(
            np.concatenate([items.ravel(), described.ravel(), every, np.array([longest], np.int32)])
        )
        sizes = [items.size, described.size, len(every), 1]
        on_device = sent.to(device, non_blocking=True).split(sizes)
        return cls(
            on_device[2],
            on_device[0].view(items.shape),
            on_device[1].view(described.shape),
            tables.to(torch.int32),
            tile,
            int(of_tiles.max()),
            int(of_tiles[of_tiles > 1].sum()),
            longest,
            group,
            on_device[3] if len(counts) == 1 else None,
        )


def keys_of(first: Ints, last: Ints) -> Ints:
    """The number of keys that tiles count as, if their first and last rows have these positions."""
    return last + 1 + (last - first) // MASKED_COST


def cut(tiles: Ints, keys: Ints, parts: Ints) -> tuple[Ints, Ints]:
    """The items and the description of ``tiles``, of which the first fields of an item are given.
    They have so many ``keys`` and are cut into ``parts``."""
    taken = np.where(parts > 1, parts, 0)
    slots = taken.cumsum() - taken
    tile = np.arange(len(tiles)).repeat(parts)
    part = np.arange(len(tile)) - (parts.cumsum() - parts)[tile]
    items = np.column_stack([tiles[tile], part, parts[tile], slots[tile] + part])
    order = (-keys / parts)[tile].argsort(kind="stable")  # short ones fill the end
    described = np.column_stack([tiles[:, 1], tiles[:, 3], slots, parts])
    return items[order].astype(np.int32), described.astype(np.int32)


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


def pick_parts(
    keys: Ints,
    kv_heads: int,
    at_once: int,
    most_parts: int = MOST_PARTS,
    most_items: int | None = None,
) -> Ints:
    """The number of parts that each tile is cut into, if tiles have so many ``keys`` and
    ``at_once`` programs run at a time: parts of about the same length, as many of them as end
    first. At most ``most_parts`` of a tile and ``most_items`` of all tiles."""
    longest, total = int(keys.max()), int(keys.sum()) * kv_heads
    # Tries parts that are as long as the longest tile divided by 1, 1.5, 2, …
    twice = np.arange(2, 2 * max(1, min(longest // KEYS_PER_PART, most_parts)) + 1)
    is_long = twice[1:] * (total / SHORT_PARTS) <= 2 * longest * at_once
    twice = twice[: 2 + int(np.count_nonzero(is_long))]  # no need to try shorter parts
    choices = np.maximum(1, -(-keys * twice[:, None] // (2 * longest))).astype(keys.dtype)
    counts = choices.sum(1)
    if most_items is not None:
        fitting = max(1, int(np.count_nonzero(counts <= most_items)))
        choices, counts = choices[:fitting], counts[:fitting]
    lengths = keys / choices + np.where(choices > 1, PART_COST, 0)
    until = lengths.max(1)  # if all parts run at once
    for number in np.flatnonzero(counts * kv_heads > at_once).tolist():
        until[number] = _keys_until_done(lengths[number], choices[number] * kv_heads, at_once)
    until[1:] += COMBINING_COST
    best: Ints = choices[until.argmin()]
    return best


def _keys_until_done(lengths: Floats, counts: Ints, at_once: int) -> float:
    """The most keys that one of the programs side by side attends to, if there are
    ``counts`` programs of these ``lengths``: those with the most are followed by those with the
    fewest."""
    order = lengths.argsort()[::-1]
    every = lengths[order].repeat(counts[order])
    rounds = np.zeros((-(-len(every) // at_once), at_once))
    rounds.ravel()[: len(every)] = every
    rounds[1::2] = rounds[1::2, ::-1].copy()
    return float(rounds.sum(0).max())


def programs_at_once(device: torch.device, tile: Tile) -> int:
    """The number of programs of this tile that a device runs at a time."""
    if device.type != "cuda":
        return 1
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return processors * max(1, 8 // tile.warps)
