"""Writing stored rows into pages: one kernel gathers rows of several stored chunks, rotates their
keys to the new positions and writes keys and values of all layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl

from kvboost.model.triton.host import send
from kvboost.model.triton.pages import VECTOR_BYTES, PagedLayers, is_aligned, slots_of
from kvboost.model.triton.rotation import channels_of

ROWS = 32
"""Rows of one program."""
WARPS = 4


@dataclass(frozen=True)
class StoredSpan:
    """``count`` rows of ``source``, ``[2, layers, kv_heads, tokens, dim]`` on the device of the
    pages, from ``start`` on. They are moved to ``position`` and the positions after it."""

    source: torch.Tensor
    start: int
    count: int
    position: int


@dataclass(frozen=True)
class MovedRows:
    """Rows of stored spans and the slots they are written to."""

    spans: Sequence[StoredSpan]
    sources: torch.Tensor
    """int64 ``[spans, 5]``: address of each span's source, strides of keys and values, layers,
    heads and tokens in bytes."""
    span_of: torch.Tensor
    """int64 ``[rows]``, as the next two."""
    source_rows: torch.Tensor
    slots: torch.Tensor
    are_aligned: bool

    @classmethod
    def of(cls, spans: Sequence[StoredSpan], table: torch.Tensor, layers: PagedLayers) -> MovedRows:
        """The rows of ``spans``, which go to the request whose pages are ``table``, ``[pages]``."""
        if not spans:
            raise ValueError("there are no spans to move")
        _check_spans(spans, table, layers)
        described = np.array(
            [
                (
                    *(span.source.data_ptr(), *span.source.stride()[:4]),
                    *(span.start, span.position, span.count),
                )
                for span in spans
            ]
        )
        sources = described[:, :5]
        sources[:, 1:] *= layers.first.itemsize
        starts, positions, counts = described[:, 5:].T
        firsts = counts.cumsum() - counts
        parts = [sources.ravel(), counts, starts - firsts, positions - firsts]
        sent = send(torch.from_numpy(np.concatenate(parts)), table.device)
        addresses, each, source_at, page_at = sent.split([len(part) for part in parts])
        # The device writes out what differs row by row.
        total = int(counts.sum())
        span_of = torch.repeat_interleave(each, output_size=total)
        row = torch.arange(total, device=table.device)
        return cls(
            spans,
            addresses.view(-1, 5),
            span_of,
            source_at[span_of] + row,
            slots_of(page_at[span_of] + row, table, layers.page),
            is_aligned(*np.unique(sources).tolist()),
        )


def _check_spans(spans: Sequence[StoredSpan], table: torch.Tensor, layers: PagedLayers) -> None:
    like = layers.first
    shape = (2, len(layers), layers.kv_heads, layers.dim)
    most = len(table) * layers.page
    dtype, device = like.dtype, like.device
    for number, span in enumerate(spans):
        source = span.source
        *outer, rows, dim = source.shape
        alike = source.dtype == dtype and source.device == device
        if not alike or (*outer, dim) != shape or source.stride(-1) != 1:
            needed = (*shape[:3], -1, shape[3])
            raise ValueError(
                f"span {number} is {source.dtype} {tuple(source.shape)} on {source.device}, "
                f"strides {source.stride()}; the pages need {dtype} {needed} on {device}, the last "
                "dimension contiguous"
            )
        if min(span.start, span.position) < 0 or span.count < 1:
            raise ValueError(
                f"span {number} moves {span.count} rows from {span.start} to {span.position}"
            )
        if span.start + span.count > rows or span.position + span.count > most:
            raise ValueError(
                f"span {number} moves rows {span.start} to {span.start + span.count} to "
                f"{span.position}; its source has {rows} rows and the request's pages {most}"
            )


@triton.jit
def _mixed(new, at, mask, share):
    """``new`` has this ``share``, and what is there the rest."""
    old = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return old + (new - old) * share


@triton.jit(
    do_not_specialize=["num_rows", "spans_per_layer"],
    do_not_specialize_on_alignment=["sources", "span_of", "source_rows", "slots"],
)
def _move_kernel(
    like,
    sources,
    span_of,
    source_rows,
    slots,
    num_rows,
    cos,
    sin,
    spans_per_layer,
    addresses,
    page_stride,
    head_stride,
    token_stride,
    share,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDE_PAIRS: tl.constexpr,
    PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
):
    layer, head = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    used = row < num_rows
    span = tl.load(span_of + row, mask=used, other=0)
    source = sources + span * 5
    address = tl.load(source) + tl.load(source + 2) * layer + tl.load(source + 3) * head
    address += tl.load(source + 4) * tl.load(source_rows + row, mask=used, other=0)
    keys = tl.multiple_of(address.to(like.dtype), ALIGN)
    values = tl.multiple_of((address + tl.load(source + 1)).to(like.dtype), ALIGN)

    slot = tl.load(slots + row, mask=used, other=0)
    pages = tl.multiple_of(tl.load(addresses + layer).to(like.dtype), ALIGN)
    to = pages + (
        (slot // PAGE) * page_stride
        + head.to(tl.int64) * head_stride
        + (slot % PAGE) * token_stride
    )

    pair = tl.arange(0, WIDE_PAIRS)
    rotates = used[:, None] & (pair[None, :] < PAIRS)
    at = (layer.to(tl.int64) * spans_per_layer + span)[:, None] * PAIRS + pair[None, :]
    cosine = tl.load(cos + at, mask=rotates, other=1.0)
    sine = tl.load(sin + at, mask=rotates, other=0.0)
    first, second = channels_of(pair[None, :], PAIRS, INTERLEAVED)
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
    rows: MovedRows,
    layers: PagedLayers,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    *,
    interleaved: bool = False,
    share: float | None = None,
) -> None:
    """Writes ``rows`` into the pages of all layers. ``cos_sin`` are float32 ``[layers, spans,
    pairs]``, or ``[1, spans, pairs]`` if layers rotate alike: how far the keys of each span rotate.
    Pairs are channels ``(i, i + pairs)``, or neighbours if ``interleaved``; channels beyond ``2 *
    pairs`` are not rotated. Computed in float32, rounded once; keys that rotate by no angle keep
    their bits. With a ``share``, the rows are mixed with those that are there, which have the
    rest."""
    cos, sin = (part.contiguous() for part in cos_sin)
    kinds, spans, pairs = cos.shape
    if kinds not in (1, len(layers)) or spans != len(rows.spans) or 2 * pairs > layers.dim:
        raise ValueError(
            f"cosines have shape {tuple(cos.shape)}; {len(layers)} layers of dimension "
            f"{layers.dim} and {len(rows.spans)} spans need [{len(layers)} or 1, "
            f"{len(rows.spans)}, at most {layers.dim // 2}]"
        )
    grid = (-(-len(rows.slots) // ROWS), len(layers) * layers.kv_heads)
    _move_kernel[grid](
        *(layers.first, rows.sources, rows.span_of, rows.source_rows, rows.slots),
        *(len(rows.slots), cos, sin, spans if kinds > 1 else 0),
        *(layers.addresses, *layers.strides, share),
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
