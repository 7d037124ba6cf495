"""Compiling kernels before a request waits for one."""

from __future__ import annotations

from dataclasses import replace
from itertools import product, starmap

import numpy as np
import torch

from kvboost.model.triton.attention import FEW_COMBINED, attend
from kvboost.model.triton.mass import attention_mass
from kvboost.model.triton.move import MovePlan, Source, StoredSpan, move
from kvboost.model.triton.pages import PagedLayers
from kvboost.model.triton.rows import LEAST_DENSE, MOST_PARTS, Tile, TiledRows, dense_tile, tiles_of
from kvboost.model.triton.shift import ShiftPlan, ShiftRows, shift

PAGES = 2
MORE_PARTS = [1 << bit for bit in range(2, MOST_PARTS.bit_length())]
"""The kernel that combines parts is compiled for powers of two."""


def warm_up(
    layers: PagedLayers,
    heads: int,
    pairs: int,
    blocks: int,
    *,
    interleaved: bool = False,
    joined: bool = False,
) -> None:
    """Runs every kernel once, in all forms that requests need, over a few pages of its own with the
    shape of ``layers``. ``pairs`` are the rotating pairs of channels of a head, ``blocks`` those of
    a span in the shift. ``joined``: rows are keys and values in one (latents). Takes seconds the
    first time; triton keeps what it compiled on disk."""
    like = layers.first
    kv_heads, page, dim = layers.kv_heads, layers.page, layers.dim
    pages = torch.zeros_like(like[:PAGES])
    own = PagedLayers([pages] * len(layers))
    table = torch.arange(PAGES, dtype=torch.int32, device=like.device)
    width, rotated = (2 * dim, 2 * pairs) if joined else (dim, None)
    query = torch.zeros(1, heads, width, dtype=like.dtype, device=like.device)
    absent = torch.zeros(PAGES * page, dtype=torch.bool, device=like.device)
    weights = torch.ones(1, 1, device=like.device)
    position = torch.tensor([page])

    def rows_of(tile: Tile, parts: int, requests: int = 1) -> TiledRows:
        return TiledRows.of(
            [position] * requests,
            table.expand(requests, -1),
            page=page,
            heads=heads,
            kv_heads=kv_heads,
            dtype=like.dtype,
            tile=tile,
            parts=parts,
        )

    tiles = tiles_of(like.dtype, dim)
    for rows in starmap(rows_of, product(tiles, (1, 2))):
        attend(query, pages, rows, 1.0, rotated=rotated)
        attention_mass(query, pages, rows, 1.0, page, weights, absent=absent, rotated=rotated)
    for parts in MORE_PARTS:
        attend(query, pages, rows_of(tiles[0], parts), 1.0, rotated=rotated)
    rows = rows_of(tiles[-1], 2)
    many = FEW_COMBINED // (tiles[-1].rows * kv_heads) + 1  # combined in another form than few
    rows = replace(rows, tiles=rows.tiles.repeat(many, 1))
    attend(query, pages, rows, 1.0, rotated=rotated)

    if not joined and (tile := dense_tile(like.device, like.dtype, dim, LEAST_DENSE)) is not None:
        for parts in (1, 2):
            attend(query, pages, rows_of(tile, parts), 1.0)
    if (tile := Tile.over(pages, LEAST_DENSE)).reads == "pages":
        for parts, requests in product((1, 2), (1, 2)):
            rows = rows_of(tile, parts, requests)
            attend(query.expand(2, -1, -1), pages, rows, 1.0, rotated=rotated)

    angles = torch.ones(page + 1, pairs, device=like.device)
    stored = torch.zeros(2, len(layers), kv_heads, 1, dim, dtype=like.dtype, device=like.device)
    turn = np.ones((2, 1, 1, pairs), np.float32)
    (moved,) = MovePlan.of([[StoredSpan(Source(stored), 0, 1, 0)]], turn, table, own)
    for share in (None, 0.5):
        move(moved, own, interleaved=interleaved, share=share)
    block_of, shares = np.zeros(page + 1, np.int64), np.ones((1, blocks, blocks), np.float32)
    plan = ShiftPlan.of(ShiftRows.of(position.numpy(), block_of, shares), table)
    fresh = query.new_zeros(1, kv_heads, width)
    shift(fresh, fresh, pages, plan, (angles, angles), error_weight=1.0, interleaved=interleaved)
