"""The shift over pages: the mean difference between recomputed and stale rows of each moved span,
added to the span's other rows. Keys are compared at position 0 and the difference is rotated to
each row's position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kvboost.model.triton.host import send
from kvboost.model.triton.pages import check_pages, slots_of
from kvboost.model.triton.rotation import channels_of

ROWS = 32
"""Rows that a program handles at a time."""
ROWS_PER_PART = 256
"""If spans have more recomputed rows than this, several programs sum them up."""
MOST_PARTS = 32
MOST_PROGRAMS = 256
"""Programs that shift rows of one head, several times if there are more rows. A captured plan is
mostly padding, and a program that finds none but that ends."""
WARPS = 4


@dataclass(frozen=True)
class ShiftPlan:
    """Which rows of a request show the offset of their span and which receive it; the same in all
    layers. Each is sorted by span and position."""

    fresh: torch.Tensor
    """int64 ``[3, fresh]``: rows in the segment, slots and positions of recomputed moved rows."""
    weights: torch.Tensor
    """float32 ``[fresh]``: what each adds to the offset of its span."""
    bounds: torch.Tensor
    """int64 ``[spans + 1]``: where the recomputed rows of each span begin."""
    stale: torch.Tensor
    """int64 ``[3, stale]``: spans, slots and positions of moved rows that are not recomputed. A
    slot of -1 is padding."""
    end: int
    """One past the last moved position."""
    parts: int
    """How many programs sum up the rows of a span."""

    @classmethod
    def of(
        cls,
        positions: torch.Tensor,
        span_of: torch.Tensor,
        weights: torch.Tensor,
        table: torch.Tensor,
        page: int,
    ) -> ShiftPlan:
        """``positions`` are all rows of the segment; ``span_of``, ``[prompt]``, is -1 for rows that
        are not moved; ``weights`` are those of the rows of the segment that are moved, in order.
        All on the CPU. ``table``, ``[pages]`` on the device, has the request's pages."""
        index = (span_of[positions] >= 0).nonzero()[:, 0]
        if len(weights) != len(index):
            raise ValueError(f"{len(index)} moved rows are recomputed; {len(weights)} weights")
        which = span_of[positions[index]]
        order = which.argsort(stable=True)
        index, which = index[order], which[order]
        num_spans = int(span_of.max()) + 1
        bounds = torch.searchsorted(which, torch.arange(num_spans + 1))
        most = int(bounds.diff().max()) if num_spans else 0
        is_stale = span_of >= 0
        is_stale[positions] = False
        stale = is_stale.nonzero()[:, 0]
        parts = [index, positions[index], bounds, span_of[stale], stale]
        sent = send(torch.cat([part.long() for part in parts]), table.device)
        index, at, bounds, spans, stale = sent.split([len(part) for part in parts])
        return cls(
            torch.stack([index, slots_of(at, table, page), at]),
            send(weights[order].float(), table.device),
            bounds,
            torch.stack([spans, slots_of(stale, table, page), stale]),
            int((span_of >= 0).nonzero()[-1]) + 1 if num_spans else 0,
            cls.pick_parts(most),
        )

    @staticmethod
    def pick_parts(most: int) -> int:
        """How many programs sum up a span of up to ``most`` recomputed rows."""
        return min(-(-most // ROWS_PER_PART), MOST_PARTS)

    def load(self, other: ShiftPlan) -> bool:
        """Takes over what ``other`` holds, padded; False if it does not fit."""
        fresh, spans, stale = other.fresh.shape[1], len(other.bounds), other.stale.shape[1]
        if (
            fresh > self.fresh.shape[1]
            or spans > len(self.bounds)
            or stale > self.stale.shape[1]
            or other.end > self.end
        ):
            return False
        self.fresh[:, :fresh].copy_(other.fresh)
        self.weights[:fresh].copy_(other.weights)
        self.bounds[:spans].copy_(other.bounds)
        self.bounds[spans:].fill_(fresh)
        self.stale[:, :stale].copy_(other.stale)
        self.stale[1, stale:].fill_(-1)
        return True

    def clear(self) -> None:
        """Shifts nothing."""
        self.bounds.zero_()
        self.stale[1].fill_(-1)


@triton.jit(
    do_not_specialize=["num_fresh"],
    do_not_specialize_on_alignment=["fresh", "weights", "bounds"],
)
def _errors_kernel(
    keys,
    key_row_stride,
    key_head_stride,
    values,
    value_row_stride,
    value_head_stride,
    pages,
    page_stride,
    head_stride,
    token_stride,
    fresh,
    num_fresh,
    weights,
    bounds,
    cos,
    sin,
    offsets,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDE_PAIRS: tl.constexpr,
    PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A part of the offset of one span in one head: of keys at position 0, and of values."""
    span, head, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    pair, channel = tl.arange(0, WIDE_PAIRS), tl.arange(0, WIDE)[None, :]
    first, second = channels_of(pair[None, :], PAIRS, INTERLEAVED)
    of_first = tl.zeros([WIDE_PAIRS], tl.float32)
    of_second = tl.zeros([WIDE_PAIRS], tl.float32)
    of_plain = tl.zeros([WIDE], tl.float32)
    of_values = tl.zeros([WIDE], tl.float32)
    begin, end = tl.load(bounds + span), tl.load(bounds + span + 1)
    share = tl.cdiv(end - begin, tl.num_programs(2))
    begin += part * share
    end = tl.minimum(begin + share, end)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        used = row < end
        weight = tl.load(weights + row, mask=used, other=0.0)[:, None]
        index = tl.load(fresh + row, mask=used, other=0)
        slot = tl.load(fresh + num_fresh + row, mask=used, other=0)
        position = tl.load(fresh + 2 * num_fresh + row, mask=used, other=0)
        stale = pages + head * head_stride
        stale += ((slot // PAGE) * page_stride + (slot % PAGE) * token_stride)[:, None]
        key = keys + head * key_head_stride + (index * key_row_stride)[:, None]
        value = values + head * value_head_stride + (index * value_row_stride)[:, None]

        rotates = used[:, None] & (pair[None, :] < PAIRS)
        cosine = tl.load(cos + position[:, None] * PAIRS + pair[None, :], mask=rotates, other=1.0)
        sine = tl.load(sin + position[:, None] * PAIRS + pair[None, :], mask=rotates, other=0.0)
        x = _difference(key + first, stale + first, rotates)
        y = _difference(key + second, stale + second, rotates)
        of_first += tl.sum(weight * (x * cosine + y * sine), 0)
        of_second += tl.sum(weight * (y * cosine - x * sine), 0)
        if 2 * PAIRS < DIM:  # channels that do not rotate
            plain = used[:, None] & (channel >= 2 * PAIRS) & (channel < DIM)
            of_plain += tl.sum(weight * _difference(key + channel, stale + channel, plain), 0)
        inside = used[:, None] & (channel < DIM)
        error = _difference(value + channel, stale + (DIM + channel), inside)
        of_values += tl.sum(weight * error, 0)
    number = part * tl.num_programs(0) + span
    to = offsets + (number * tl.num_programs(1) + head) * (2 * DIM)
    first, second = channels_of(pair, PAIRS, INTERLEAVED)
    tl.store(to + first, of_first, mask=pair < PAIRS)
    tl.store(to + second, of_second, mask=pair < PAIRS)
    channel = tl.arange(0, WIDE)
    if 2 * PAIRS < DIM:
        tl.store(to + channel, of_plain, mask=(channel >= 2 * PAIRS) & (channel < DIM))
    tl.store(to + DIM + channel, of_values, mask=channel < DIM)


@triton.jit
def _difference(one, other, mask):
    one = tl.load(one, mask=mask, other=0.0).to(tl.float32)
    return one - tl.load(other, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _add(to, offset, mask):
    sum = tl.load(to, mask=mask, other=0.0).to(tl.float32) + offset
    tl.store(to, sum.to(to.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_stale"], do_not_specialize_on_alignment=["stale"])
def _shift_kernel(
    pages,
    page_stride,
    head_stride,
    token_stride,
    stale,
    num_stale,
    cos,
    sin,
    offsets,
    DIM: tl.constexpr,
    WIDE: tl.constexpr,
    PAIRS: tl.constexpr,
    WIDE_PAIRS: tl.constexpr,
    PAGE: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Adds the offsets of their spans to some rows, in one head. Padding is at the end."""
    head = tl.program_id(1).to(tl.int64)
    pair, channel = tl.arange(0, WIDE_PAIRS)[None, :], tl.arange(0, WIDE)[None, :]
    first, second = channels_of(pair, PAIRS, INTERLEAVED)
    start = tl.program_id(0) * ROWS
    while start < num_stale:
        row = start + tl.arange(0, ROWS)
        slot = tl.load(stale + num_stale + row, mask=row < num_stale, other=-1)
        used = slot >= 0
        start = tl.where(tl.max(slot, 0) < 0, num_stale, start + tl.num_programs(0) * ROWS)
        span = tl.load(stale + row, mask=used, other=0)
        position = tl.load(stale + 2 * num_stale + row, mask=used, other=0)
        to = pages + head * head_stride
        to += ((slot // PAGE) * page_stride + (slot % PAGE) * token_stride)[:, None]
        offset = offsets + ((span * tl.num_programs(1) + head) * (2 * DIM))[:, None]

        rotates = used[:, None] & (pair < PAIRS)
        cosine = tl.load(cos + position[:, None] * PAIRS + pair, mask=rotates, other=1.0)
        sine = tl.load(sin + position[:, None] * PAIRS + pair, mask=rotates, other=0.0)
        x = tl.load(offset + first, mask=rotates, other=0.0)
        y = tl.load(offset + second, mask=rotates, other=0.0)
        _add(to + first, x * cosine - y * sine, rotates)
        _add(to + second, y * cosine + x * sine, rotates)
        if 2 * PAIRS < DIM:
            plain = used[:, None] & (channel >= 2 * PAIRS) & (channel < DIM)
            _add(to + channel, tl.load(offset + channel, mask=plain, other=0.0), plain)
        inside = used[:, None] & (channel < DIM)
        of_values = tl.load(offset + (DIM + channel), mask=inside, other=0.0)
        _add(to + (DIM + channel), of_values, inside)


def shift(
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    plan: ShiftPlan,
    cos_sin: tuple[torch.Tensor, torch.Tensor],
    *,
    interleaved: bool = False,
) -> None:
    """Compares fresh ``keys`` and ``values`` of a segment, ``[rows, kv_heads, dim]``, with the
    stale rows in ``pages`` of one layer, and shifts the other rows of the moved spans there. Fresh
    rows are not written. ``cos_sin`` are float32 ``[positions, pairs]``: the layer's rotation to
    each position, of pairs as in ``move``."""
    kv_heads, page, dim = check_pages(pages)
    cos, sin = (part.contiguous() for part in cos_sin)
    keys, values = (part if part.stride(2) == 1 else part.contiguous() for part in (keys, values))
    spans, pairs = len(plan.bounds) - 1, cos.shape[1]
    if len(cos) < plan.end:
        raise ValueError(f"cosines cover {len(cos)} positions; moved rows end at {plan.end}")
    num_fresh, num_stale = plan.fresh.shape[1], plan.stale.shape[1]
    if not (num_fresh and num_stale):
        return
    size = (plan.parts, spans, kv_heads, 2 * dim)
    offsets = torch.empty(size, dtype=torch.float32, device=pages.device)
    constants = {
        "DIM": dim,
        "WIDE": triton.next_power_of_2(dim),
        "PAIRS": pairs,
        "WIDE_PAIRS": triton.next_power_of_2(pairs),
        "PAGE": page,
        "INTERLEAVED": interleaved,
        "ROWS": ROWS,
        "num_warps": WARPS,
    }
    _errors_kernel[(spans, kv_heads, plan.parts)](
        *(keys, keys.stride(0), keys.stride(1), values, values.stride(0), values.stride(1)),
        *(pages, *pages.stride()[:3]),
        *(plan.fresh, num_fresh, plan.weights, plan.bounds, cos, sin, offsets),
        **constants,
    )
    offsets = offsets.sum(0) if plan.parts > 1 else offsets[0]
    _shift_kernel[(min(triton.cdiv(num_stale, ROWS), MOST_PROGRAMS), kv_heads)](
        *(pages, *pages.stride()[:3], plan.stale, num_stale, cos, sin, offsets), **constants
    )
