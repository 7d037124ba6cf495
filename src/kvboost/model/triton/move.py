"""Writing stored rows into pages: one kernel gathers rows of several stored chunks, rotates their
keys to the new positions and writes keys and values of all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl

from kvboost.model.triton.host import send
from kvboost.model.triton.pages import VECTOR_BYTES, PagedLayers, halves
from kvboost.model.triton.scores import channels_of

ROWS = 32
"""Rows of one program."""
WARPS = 4


Numbers = np.ndarray[Any, np.dtype[Any]]


class Source:
    """Rows ``[2, layers, kv_heads, tokens, dim]`` on a device, described for a kernel once:
    asking a tensor for its address and strides takes the host microseconds. Or rows that are keys
    and values in one, ``[1, layers, kv_heads, tokens, 2 * dim]``."""

    __slots__ = ("numbers", "tensor")

    def __init__(self, tensor: torch.Tensor, page_step: int = 0) -> None:
        """With a ``page_step``, the tensor is the first of many pages: each begins so many strides
        of a token after the one before it, and has a multiple of ``ROWS`` rows."""
        self.tensor = tensor = halves(tensor[0]) if len(tensor) == 1 else tensor
        self.numbers = (tensor.data_ptr(), *tensor.stride()[:4], tensor.shape[3], page_step)
        """The address, the strides of all but the last dimension, the number of tokens, and the
        step to the next page."""


class StoredSpan(NamedTuple):
    """``num_rows`` rows of ``source``, which is on the device of the pages, from ``start`` on. They
    are moved to ``position`` and the positions after it; their keys rotate by one of several
    rotations, named by its number. ``pages``: those of the source that have the rows, in order."""

    source: Source
    start: int
    num_rows: int
    position: int
    rotation: int = 0
    pages: Sequence[int] = (0,)


@dataclass(frozen=True)
class MovePlan:
    """Rows of stored spans and the pages they are written to, sent to the device in one copy."""

    spans: Sequence[StoredSpan]
    sources: torch.Tensor
    """int64 ``[spans, 6]``: address of each span's source, strides of keys and values, layers,
    heads and tokens in bytes, and the number of the rotation."""
    items: torch.Tensor
    """int32 ``[items, 4]``, what programs move: span, first row in its source, position of that
    row, and number of rows."""
    cos_sin: torch.Tensor
    """float32 ``[2, layers or 1, rotations, pairs]``."""
    table: torch.Tensor
    """int32 ``[pages]``: the request's pages, in order."""
    are_aligned: bool

    @classmethod
    def of(
        cls,
        groups: Sequence[Sequence[StoredSpan]],
        turns: Numbers,
        table: torch.Tensor,
        layers: PagedLayers,
    ) -> list[MovePlan]:
        """The rows of spans, group by group, which go to the request whose pages are ``table``,
        ``[pages]``. ``turns`` are cosines and sines, float32 ``[2, layers, rotations, pairs]``, or
        ``[2, 1, rotations, pairs]`` if layers rotate alike. Pairs are channels ``(i, i + pairs)``,
        or neighbours; those beyond ``2 * pairs`` are not rotated."""
        spans = [span for group in groups for span in group]
        if not all(groups) or not spans:
            raise ValueError("there are no spans to move")
        _check_turns(turns, spans, layers)
        sources, span, items = _describe(spans, table, layers)
        parts = [part.view(np.int32).ravel() for part in (sources, items, turns)]
        sent = send(torch.from_numpy(np.concatenate(parts)), table.device)
        on_device = sent.split([len(part) for part in parts])
        firsts = np.cumsum([0, *(len(group) for group in groups)])
        ends = np.searchsorted(span, firsts)
        described = on_device[0].view(torch.int64).view(-1, 6)
        moved = on_device[1].view(-1, 4)
        cos_sin = on_device[2].view(torch.float32).view(turns.shape)
        are_aligned = not (sources[:, :5] % VECTOR_BYTES).any()
        return [
            cls(group, described, moved[start:end], cos_sin, table, are_aligned)
            for group, start, end in zip(groups, ends[:-1], ends[1:], strict=True)
        ]


def _describe(
    spans: Sequence[StoredSpan], table: torch.Tensor, layers: PagedLayers
) -> tuple[Numbers, Numbers, Numbers]:
    """The sources and the items of :class:`MovePlan`, and the span of each item. Checks that they
    fit."""
    known = set()  # there are few sources, or they differ in few ways
    numbers = []
    pages: list[int] = []
    for number, (source, start, count, position, rotation, some) in enumerate(spans):
        *_, tokens, step = described = source.numbers
        form = described[1:]
        if form not in known:
            _check_source(source.tensor, number, layers)
            known.add(form)
        numbers.append((*described[:5], rotation, start, count, position, tokens, step, len(pages)))
        pages += some
    table_of = np.array(numbers, np.int64)
    sources = np.ascontiguousarray(table_of[:, :6])
    sources[:, 1:5] *= layers.first.itemsize
    starts, counts, positions, tokens_there, steps, first_pages = table_of[:, 6:].T
    rows = np.diff(np.append(first_pages, len(pages))) * tokens_there
    most = len(table) * layers.page
    fits = (starts + counts <= rows) & (positions + counts <= most)
    fits &= (starts >= 0) & (positions >= 0) & (counts >= 1)
    if not fits.all():
        number = int(fits.argmin())
        span = spans[number]
        if min(span.start, span.position) < 0 or span.num_rows < 1:
            raise ValueError(
                f"span {number} moves {span.num_rows} rows from {span.start} to {span.position}"
            )
        raise ValueError(
            f"span {number} moves rows {span.start} to {span.start + span.num_rows} to "
            f"{span.position}; its source has {rows[number]} rows and the request's pages {most}"
        )
    # A program moves rows of one page: tiles begin at multiples of their size.
    first_tiles = starts // ROWS
    tiles = (starts + counts - 1) // ROWS - first_tiles + 1
    of = np.arange(len(spans)).repeat(tiles)
    tile = (np.arange(len(of)) - (tiles.cumsum() - tiles)[of] + first_tiles[of]) * ROWS
    begins = np.maximum(tile, starts[of])
    ends = np.minimum(tile + ROWS, (starts + counts)[of])
    page, row = np.divmod(begins, tokens_there[of])
    row += np.array(pages, np.int64)[first_pages[of] + page] * steps[of]
    items = np.column_stack([of, row, (positions - starts)[of] + begins, ends - begins])
    return sources, of, items.astype(np.int32)


def _check_source(source: torch.Tensor, number: int, layers: PagedLayers) -> None:
    like = layers.first
    shape = (2, len(layers), layers.kv_heads, layers.dim)
    *outer, _, dim = source.shape
    alike = source.dtype == like.dtype and source.device == like.device
    if not alike or (*outer, dim) != shape or source.stride(-1) != 1:
        needed = (*shape[:3], -1, shape[3])
        raise ValueError(
            f"span {number} is {source.dtype} {tuple(source.shape)} on {source.device}, "
            f"strides {source.stride()}; the pages need {like.dtype} {needed} on {like.device}, "
            "the last dimension contiguous"
        )


def _check_turns(turns: Numbers, spans: Sequence[StoredSpan], layers: PagedLayers) -> None:
    _, kinds, rotations, pairs = turns.shape
    needed = 1 + max(span.rotation for span in spans)
    if kinds not in (1, len(layers)) or rotations < needed or 2 * pairs > layers.dim:
        raise ValueError(
            f"turns have shape {turns.shape}; {len(layers)} layers of dimension "
            f"{layers.dim} and {needed} rotations need [2, {len(layers)} or 1, {needed} or more, "
            f"at most {layers.dim // 2}]"
        )


@triton.jit
def _mixed(new, at, mask, share):
    """``new`` has this ``share``, and what is there the rest."""
    old = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return old + (new - old) * share


@triton.jit(
    do_not_specialize=["rotations", "rotations_per_layer"],
    do_not_specialize_on_alignment=["sources", "items", "angles", "table"],
)
def _move_kernel(
    like, sources, items, angles, rotations, rotations_per_layer, table,
    addresses, page_stride, head_stride, token_stride, share,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr,
    WIDE_PAIRS: tl.constexpr, PAGE: tl.constexpr, INTERLEAVED: tl.constexpr,
    ALIGN: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    layer, head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    item = items + tl.program_id(0) * 4
    source = sources + tl.load(item) * 6
    row = tl.arange(0, ROWS)
    used = row < tl.load(item + 3)
    address = tl.load(source) + tl.load(source + 2) * layer + tl.load(source + 3) * head
    address += tl.load(source + 4) * (tl.load(item + 1) + row)
    keys = tl.multiple_of(address.to(like.dtype), ALIGN)
    values = tl.multiple_of((address + tl.load(source + 1)).to(like.dtype), ALIGN)

    position = tl.load(item + 2) + row
    page = tl.load(table + position // PAGE, mask=used, other=0).to(tl.int64)
    pages = tl.multiple_of(tl.load(addresses + layer).to(like.dtype), ALIGN)
    to = pages + (
        page * page_stride + head.to(tl.int64) * head_stride + (position % PAGE) * token_stride
    )

    pair = tl.arange(0, WIDE_PAIRS)[None, :]
    turns = pair < PAIRS
    rotates = used[:, None] & turns
    at = (layer.to(tl.int64) * rotations_per_layer + tl.load(source + 5)) * PAIRS + pair
    cosine = tl.load(angles + at, mask=turns, other=1.0)
    sine = tl.load(angles + rotations * PAIRS + at, mask=turns, other=0.0)
    first, second = channels_of(pair, PAIRS, INTERLEAVED)
    x = tl.load(keys[:, None] + first, mask=rotates, other=0.0).to(tl.float32)
    y = tl.load(keys[:, None] + second, mask=rotates, other=0.0).to(tl.float32)
    element = like.dtype.element_ty
    stays = (cosine == 1.0) & (sine == 0.0)  # else a negative zero could become a positive one
    new_x = tl.where(stays, x, x * cosine - y * sine)
    new_y = tl.where(stays, y, y * cosine + x * sine)
    if share is not None:
        new_x = _mixed(new_x, to[:, None] + first, rotates, share)
        new_y = _mixed(new_y, to[:, None] + second, rotates, share)
    tl.store(to[:, None] + first, new_x.to(element), mask=rotates)
    tl.store(to[:, None] + second, new_y.to(element), mask=rotates)

    channel = tl.arange(0, WIDE)[None, :]
    if 2 * PAIRS < DIM:  # channels that do not rotate
        plain = used[:, None] & (channel >= 2 * PAIRS) & (channel < DIM)
        key = tl.load(keys[:, None] + channel, mask=plain)
        if share is not None:
            key = _mixed(key.to(tl.float32), to[:, None] + channel, plain, share).to(element)
        tl.store(to[:, None] + channel, key, mask=plain)
    inside = used[:, None] & (channel < DIM)
    value = tl.load(values[:, None] + channel, mask=inside)
    if share is not None:
        there = to[:, None] + (DIM + channel)
        value = _mixed(value.to(tl.float32), there, inside, share).to(element)
    tl.store(to[:, None] + (DIM + channel), value, mask=inside)


def move(
    rows: MovePlan, layers: PagedLayers, *, interleaved: bool = False, share: float | None = None
) -> None:
    """Writes ``rows`` into the pages of all layers, their keys rotated; pairs of channels are
    neighbours if ``interleaved``. Computed in float32, rounded once; keys that rotate by no angle
    keep their bits. With a ``share``, the rows are mixed with those that are there, which have the
    rest."""
    _, kinds, rotations, pairs = rows.cos_sin.shape
    _move_kernel[(len(rows.items), len(layers) * layers.kv_heads)](
        *(layers.first, rows.sources, rows.items, rows.cos_sin),
        *(kinds * rotations, rotations if kinds > 1 else 0),
        *(rows.table, layers.addresses, *layers.strides, share),
        KV_HEADS=layers.kv_heads,
        DIM=layers.dim,
        WIDE=triton.next_power_of_2(layers.dim),
        PAIRS=pairs,
        WIDE_PAIRS=triton.next_power_of_2(pairs),
        PAGE=layers.page,
        INTERLEAVED=interleaved,
        ALIGN=VECTOR_BYTES if rows.are_aligned and layers.is_aligned else layers.first.itemsize,
        ROWS=ROWS,
        num_warps=WARPS,
    )
