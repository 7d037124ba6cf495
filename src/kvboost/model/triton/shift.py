"""The shift over pages: the mean difference between recomputed and stale rows of each moved span,
added to the span's other rows; those of each block of a span get a mean of their own, and rows that
differ much count less. Keys are compared at position 0 and the difference is rotated to each row's
position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl

from kvboost.model.triton.host import send_into
from kvboost.model.triton.pages import are_joined, check_pages, halves
from kvboost.model.triton.scores import channels_of

COMPARED_ROWS = 16
"""Recomputed rows that a program compares at a time: the errors of more do not fit registers."""
ROWS = 32
"""Rows that a program shifts at a time."""
MOST_PROGRAMS = 256
"""Programs that shift rows of one head, several times if there are more rows. A captured plan is
mostly padding, and a program that finds none but that ends."""
WARPS, WIDE_ROWS = 4, 256
"""Programs of wider rows have twice as many warps: their errors would not fit registers."""


Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class ShiftRows:
    """Which rows of a request show the offset of their span and which receive it, on the host."""

    fresh: Array
    """``[2, fresh]``: rows in the segment and positions of recomputed moved rows, by span."""
    weights: Array
    """float32 ``[fresh, blocks]``: what each adds to the offset of each block of its span."""
    bounds: Array
    """``[spans + 1]``: where the recomputed rows of each span begin."""
    stale: Array
    """``[2, stale]``: blocks and positions of moved rows that are not recomputed."""
    end: int
    """One past the last moved position."""

    @classmethod
    def of(cls, at: Array, block_of: Array, weights: Array) -> ShiftRows:
        """``at`` are the positions of all rows of the segment; ``block_of``, ``[prompt]``, is -1
        for rows that are not moved, and each span has ``blocks`` of them; ``weights``,
        ``[spans, blocks, blocks]``, are what a row adds to the offset of each block (dimension 1)
        if it is in another (dimension 2)."""
        spans, blocks, _ = weights.shape
        which = block_of[at]
        index = np.flatnonzero(which >= 0)
        which = which[index]
        order = which.argsort(kind="stable")
        index, which = index[order], which[order]
        is_stale = block_of >= 0
        moved = np.flatnonzero(is_stale)
        is_stale[at] = False
        stale = np.flatnonzero(is_stale)
        return cls(
            np.stack([index, at[index]]),
            weights.transpose(0, 2, 1).reshape(-1, blocks)[which],
            np.searchsorted(which // blocks, np.arange(spans + 1)),
            np.stack([block_of[stale], stale]),
            int(moved[-1]) + 1 if len(moved) else 0,
        )


@dataclass(frozen=True)
class ShiftPlan:
    """The same on the device, the same in all layers, with room for more. It is in one piece, so
    that one copy sends it::

        num_stale | num_spans | bounds | weights | fresh | stale
    """

    data: torch.Tensor
    """int32."""
    most_spans: int
    num_blocks: int
    """Of each span."""
    num_fresh: int
    """There is room for so many spans and recomputed rows."""
    end: int
    """One past the last moved position, at most."""
    table: torch.Tensor
    """int32 ``[pages]``: the request's pages, in order."""

    @classmethod
    def of(cls, rows: ShiftRows, table: torch.Tensor) -> ShiftPlan:
        """A plan of just these rows."""
        (num_fresh, blocks), spans = rows.weights.shape, len(rows.bounds) - 1
        plan = cls.empty(spans, blocks, num_fresh, rows.stale.shape[1], rows.end, table)
        plan.load(rows)
        return plan

    @classmethod
    def empty(
        cls,
        most_spans: int,
        num_blocks: int,
        num_fresh: int,
        num_stale: int,
        end: int,
        table: torch.Tensor,
    ) -> ShiftPlan:
        """A plan that shifts nothing, with room for so much."""
        size = 3 + most_spans + (num_blocks + 2) * num_fresh + 2 * num_stale
        data = torch.zeros(size, dtype=torch.int32, device=table.device)
        return cls(data, most_spans, num_blocks, num_fresh, end, table)

    @property
    def most_stale(self) -> int:
        return (len(self.data) - self._head) // 2

    @property
    def num_stale(self) -> torch.Tensor:
        """int32 ``[1]``: how many rows are shifted."""
        return self.data[:1]

    @property
    def num_spans(self) -> torch.Tensor:
        """int32 ``[1]``: how many there are."""
        return self.data[1:2]

    @property
    def bounds(self) -> torch.Tensor:
        """int32 ``[spans + 1]``, as those of :class:`ShiftRows`."""
        return self.data[2 : 3 + self.most_spans]

    @property
    def weights(self) -> torch.Tensor:
        """float32 ``[fresh, blocks]``."""
        weights = self.data[3 + self.most_spans : self._head - 2 * self.num_fresh]
        return weights.view(torch.float32).view(-1, self.num_blocks)

    @property
    def fresh(self) -> torch.Tensor:
        """int32 ``[2, fresh]``: rows in the segment, and positions."""
        return self.data[self._head - 2 * self.num_fresh : self._head].view(2, -1)

    @property
    def stale(self) -> torch.Tensor:
        """int32 ``[stale, 2]``: block and position of each."""
        return self.data[self._head :].view(-1, 2)

    def load(self, rows: ShiftRows) -> bool:
        """Takes over ``rows``; False if they do not fit."""
        (fresh, blocks), spans, stale = (
            rows.weights.shape,
            len(rows.bounds) - 1,
            rows.stale.shape[1],
        )
        if (
            fresh > self.num_fresh
            or spans > self.most_spans
            or blocks != self.num_blocks
            or stale > self.most_stale
            or rows.end > self.end
        ):
            return False
        sent = np.zeros(self._head + 2 * stale, np.int32)
        sent[:2] = stale, spans
        sent[2 : 3 + spans] = rows.bounds
        sent[3 + self.most_spans :][: rows.weights.size].view(np.float32)[:] = rows.weights.ravel()
        sent[self._head - 2 * self.num_fresh : self._head].reshape(2, -1)[:, :fresh] = rows.fresh
        sent[self._head :].reshape(-1, 2).T[:] = rows.stale
        send_into(torch.from_numpy(sent), self.data[: len(sent)])
        return True

    def clear(self) -> None:
        """Shifts nothing."""
        self.data[:2].zero_()

    @property
    def _head(self) -> int:
        """Where the rows to shift begin."""
        return 3 + self.most_spans + (self.num_blocks + 2) * self.num_fresh


@triton.jit
def _slot_address(table, position, used, page_stride, token_stride, PAGE: tl.constexpr):
    """Where the row of a position is, from the beginning of a head."""
    page = tl.load(table + position // PAGE, mask=used, other=0).to(tl.int64)
    return page * page_stride + (position % PAGE) * token_stride


@triton.jit(
    do_not_specialize=["num_fresh"],
    do_not_specialize_on_alignment=["fresh", "weights", "num_spans", "bounds", "table"],
)
def _errors_kernel(
    keys, key_row_stride, key_head_stride, values, value_row_stride, value_head_stride,
    pages, page_stride, head_stride, token_stride, fresh, num_fresh, weights, num_spans, bounds,
    table, cos, sin, offsets, error_weight,
    DIM: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr, WIDE_PAIRS: tl.constexpr,
    PAGE: tl.constexpr, INTERLEAVED: tl.constexpr, JOINED: tl.constexpr, ROWS: tl.constexpr,
    BLOCKS: tl.constexpr, WIDE_BLOCKS: tl.constexpr,
):  # fmt: skip
    """The offsets of one span's blocks in one head: of keys at position 0, and of values."""
    span, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if span >= tl.load(num_spans):  # room for more: nobody reads its offsets
        return
    keys += head * key_head_stride
    values += head * value_head_stride
    pages += head * head_stride
    begin, end = tl.load(bounds + span), tl.load(bounds + span + 1)
    square_keys = tl.zeros([ROWS], tl.float32)
    square_values = tl.zeros([ROWS], tl.float32)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        _, _, _, _, _, of_keys, of_values = _errors(
            keys, key_row_stride, values, value_row_stride, pages, page_stride, token_stride, table,
            fresh, num_fresh, row, end, DIM, WIDE, PAIRS, WIDE_PAIRS, PAGE, INTERLEAVED, JOINED,
        )  # fmt: skip
        square_keys += of_keys
        square_values += of_values
    scale_keys = error_weight * (end - begin) / tl.maximum(tl.sum(square_keys), 1e-30)
    scale_values = error_weight * (end - begin) / tl.maximum(tl.sum(square_values), 1e-30)

    pair, channel = tl.arange(0, WIDE_PAIRS)[None, :], tl.arange(0, WIDE)[None, :]
    block = tl.arange(0, WIDE_BLOCKS)[:, None]
    of_first = tl.zeros([WIDE_BLOCKS, WIDE_PAIRS], tl.float32)
    of_second = tl.zeros([WIDE_BLOCKS, WIDE_PAIRS], tl.float32)
    of_plain = tl.zeros([WIDE_BLOCKS, WIDE], tl.float32)
    of_value = tl.zeros([WIDE_BLOCKS, WIDE], tl.float32)
    # Added up after the loop: adding sums of weights there does not compile (Triton 3.6).
    count = tl.zeros([WIDE_BLOCKS, ROWS], tl.float32)
    count_keys = tl.zeros([WIDE_BLOCKS, ROWS], tl.float32)
    count_values = tl.zeros([WIDE_BLOCKS, ROWS], tl.float32)
    for start in range(begin, end, ROWS):
        row = start + tl.arange(0, ROWS)
        used = row < end
        position, x, y, plain, value, of_keys, of_values = _errors(
            keys, key_row_stride, values, value_row_stride, pages, page_stride, token_stride, table,
            fresh, num_fresh, row, end, DIM, WIDE, PAIRS, WIDE_PAIRS, PAGE, INTERLEAVED, JOINED,
        )  # fmt: skip
        weight = tl.load(
            weights + row[None, :] * BLOCKS + block,
            mask=used[None, :] & (block < BLOCKS),
            other=0.0,
        )
        weight_keys = weight / (1 + scale_keys * of_keys)[None, :]
        weight_values = weight / (1 + scale_values * of_values)[None, :]
        count += weight
        count_keys += weight_keys
        count_values += weight_values
        rotates = used[:, None] & (pair < PAIRS)
        cosine = tl.load(cos + position * PAIRS + pair, mask=rotates, other=1.0)
        sine = tl.load(sin + position * PAIRS + pair, mask=rotates, other=0.0)
        of_first = _add_rows(of_first, weight_keys, x * cosine + y * sine)
        of_second = _add_rows(of_second, weight_keys, y * cosine - x * sine)
        if 2 * PAIRS < DIM:
            of_plain = _add_rows(of_plain, weight_keys, plain)
        of_value = _add_rows(of_value, weight_values, value)
    share_keys = (tl.sum(count, 1) / tl.maximum(tl.sum(count_keys, 1), 1e-30))[:, None]
    share_values = (tl.sum(count, 1) / tl.maximum(tl.sum(count_values, 1), 1e-30))[:, None]
    to = offsets + ((span * BLOCKS + block) * tl.num_programs(1) + head) * (2 * DIM)
    inside = block < BLOCKS
    first, second = channels_of(pair, PAIRS, INTERLEAVED)
    tl.store(to + first, of_first * share_keys, mask=inside & (pair < PAIRS))
    tl.store(to + second, of_second * share_keys, mask=inside & (pair < PAIRS))
    if 2 * PAIRS < DIM:
        unrotated = inside & (channel >= 2 * PAIRS) & (channel < DIM)
        tl.store(to + channel, of_plain * share_keys, mask=unrotated)
    tl.store(to + DIM + channel, of_value * share_values, mask=inside & (channel < DIM))


@triton.jit
def _errors(
    keys, key_row_stride, values, value_row_stride, pages, page_stride, token_stride, table,
    fresh, num_fresh, row, end,
    DIM: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr, WIDE_PAIRS: tl.constexpr,
    PAGE: tl.constexpr, INTERLEAVED: tl.constexpr, JOINED: tl.constexpr,
):  # fmt: skip
    """The positions of some recomputed rows, ``[rows, 1]``, and by how much they differ from the
    stale ones in one head: keys in the first and the second channels of each pair and in those that
    do not rotate, and values; then the squared differences of keys and of values, or of both if
    these are ``JOINED`` in one row."""
    pair, channel = tl.arange(0, WIDE_PAIRS)[None, :], tl.arange(0, WIDE)[None, :]
    first, second = channels_of(pair, PAIRS, INTERLEAVED)
    used = row < end
    index = tl.load(fresh + row, mask=used, other=0).to(tl.int64)[:, None]
    position = tl.load(fresh + num_fresh + row, mask=used, other=0)
    stale = pages + _slot_address(table, position, used, page_stride, token_stride, PAGE)[:, None]
    key, value = keys + index * key_row_stride, values + index * value_row_stride
    used = used[:, None]
    x = _difference(key + first, stale + first, used & (pair < PAIRS))
    y = _difference(key + second, stale + second, used & (pair < PAIRS))
    unrotated = used & (channel >= 2 * PAIRS) & (channel < DIM)
    plain = _difference(key + channel, stale + channel, unrotated)
    other = _difference(value + channel, stale + (DIM + channel), used & (channel < DIM))
    of_keys = tl.sum(x * x, 1) + tl.sum(y * y, 1)
    if 2 * PAIRS < DIM:  # some channels do not rotate
        of_keys += tl.sum(plain * plain, 1)
    of_values = tl.sum(other * other, 1)
    if JOINED:
        of_keys += of_values
        of_values = of_keys
    return position[:, None], x, y, plain, other, of_keys, of_values


@triton.jit
def _add_rows(sums, weight, rows):
    """``sums`` of blocks, ``[blocks, channels]``, and ``rows`` by their weights."""
    return tl.dot(weight, rows, sums, input_precision="tf32x3")


@triton.jit
def _difference(one, other, mask):
    one = tl.load(one, mask=mask, other=0.0).to(tl.float32)
    return one - tl.load(other, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _add(to, offset, mask):
    sum = tl.load(to, mask=mask, other=0.0).to(tl.float32) + offset
    tl.store(to, sum.to(to.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=["stale", "num_stale", "table"])
def _shift_kernel(
    pages, page_stride, head_stride, token_stride, stale, num_stale, table, cos, sin, offsets,
    DIM: tl.constexpr, WIDE: tl.constexpr, PAIRS: tl.constexpr, WIDE_PAIRS: tl.constexpr,
    PAGE: tl.constexpr, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Adds the offsets of their blocks to some rows, in one head."""
    head = tl.program_id(1).to(tl.int64)
    pair, channel = tl.arange(0, WIDE_PAIRS)[None, :], tl.arange(0, WIDE)[None, :]
    first, second = channels_of(pair, PAIRS, INTERLEAVED)
    end = tl.load(num_stale)
    for start in range(tl.program_id(0) * ROWS, end, tl.num_programs(0) * ROWS):
        row = start + tl.arange(0, ROWS)
        used = row < end
        block = tl.load(stale + 2 * row, mask=used, other=0).to(tl.int64)
        position = tl.load(stale + 2 * row + 1, mask=used, other=0)
        to = pages + head * head_stride
        to += _slot_address(table, position, used, page_stride, token_stride, PAGE)[:, None]
        offset = offsets + ((block * tl.num_programs(1) + head) * (2 * DIM))[:, None]

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
    error_weight: float,
    interleaved: bool = False,
) -> None:
    """Compares fresh ``keys`` and ``values`` of a segment, ``[rows, kv_heads, dim]``, with the
    stale rows in ``pages`` of one layer, and shifts the other rows of the moved spans there. Fresh
    rows are not written. ``cos_sin`` are float32 ``[positions, pairs]``: the layer's rotation to
    each position, of pairs as in ``move``. A fresh row counts ``1 / (1 + error_weight * e)`` times,
    where ``e`` is its squared error relative to the mean of its span. Rows that are keys and values
    in one are given twice, as wide as those of pages."""
    kv_heads, page, dim = check_pages(pages)
    if joined := are_joined(keys, values, dim):
        keys, values = halves(keys)
    cos, sin = (part.contiguous() for part in cos_sin)
    keys, values = (part if part.stride(2) == 1 else part.contiguous() for part in (keys, values))
    spans, blocks, pairs = plan.most_spans, plan.num_blocks, cos.shape[1]
    if len(cos) < plan.end:
        raise ValueError(f"cosines cover {len(cos)} positions; moved rows end at {plan.end}")
    if not (plan.num_fresh and plan.most_stale):
        return
    size = (spans * blocks, kv_heads, 2 * dim)
    offsets = torch.empty(size, dtype=torch.float32, device=pages.device)
    constants = {
        "DIM": dim,
        "WIDE": triton.next_power_of_2(dim),
        "PAIRS": pairs,
        "WIDE_PAIRS": triton.next_power_of_2(pairs),
        "PAGE": page,
        "INTERLEAVED": interleaved,
        "num_warps": WARPS if dim <= WIDE_ROWS else 2 * WARPS,
    }
    _errors_kernel[(spans, kv_heads)](
        *(keys, keys.stride(0), keys.stride(1), values, values.stride(0), values.stride(1)),
        *(pages, *pages.stride()[:3]),
        *(plan.fresh, plan.num_fresh, plan.weights, plan.num_spans, plan.bounds, plan.table),
        *(cos, sin, offsets, error_weight),
        JOINED=joined,
        ROWS=COMPARED_ROWS,
        BLOCKS=blocks,
        WIDE_BLOCKS=max(16, triton.next_power_of_2(blocks)),
        **constants,
    )
    programs = min(triton.cdiv(plan.most_stale, ROWS), MOST_PROGRAMS)
    _shift_kernel[(programs, kv_heads)](
        *(pages, *pages.stride()[:3], plan.stale, plan.num_stale, plan.table, cos, sin, offsets),
        ROWS=ROWS,
        **constants,
    )
