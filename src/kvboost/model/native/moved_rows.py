"""Moved text: rotating keys, measuring attention to them, and the shift. Each function runs our
kernel if there is one for the KV, and torch otherwise."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass

import torch

from kvboost.model import native
from kvboost.model.execution.kv import LayerRows
from kvboost.model.native.kernels import address_of, serves
from kvboost.model.native.layers import scratch

LANES = 16
"""Kernels read this many numbers at once, also where fewer are left."""


class _MassCall(ctypes.Structure):
    _fields_ = [
        ("queries", c_void_p),
        ("head_stride", c_int64),
        ("row_stride", c_int64),
        ("keys", c_void_p),
        ("key_stride", c_int64),
        ("absent", c_void_p),
        ("weights", c_void_p),
        ("sinks", c_void_p),
        *((name, c_int32) for name in ("heads", "kv_heads", "dim", "start", "rows", "kinds")),
        ("scale", c_float),
    ]


@dataclass(frozen=True)
class RecomputedRows:
    """The recomputed rows of moved text in one layer, those of each span together."""

    index: torch.Tensor
    """Their rows in the segment."""
    positions: torch.Tensor
    end: int
    """One past the last position."""
    which: torch.Tensor
    """Their blocks."""
    num_blocks: int
    span_blocks: int
    """The number of them that belong to one span."""
    error_weight: float
    """A row counts ``1 / (1 + error_weight * e)`` times, where ``e`` is its squared error relative
    to the mean of its span."""
    cos: torch.Tensor
    sin: torch.Tensor
    """``[rows, dim]``."""


def attention_mass(
    kv: LayerRows,
    layer: int,
    query: torch.Tensor,
    scale: float,
    absent: torch.Tensor,
    weights: torch.Tensor,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The attention of the rows of ``query``, ``[1, heads, rows, dim]``, to each row before them:
    after softmax, averaged over heads, summed over rows by each of several ``weights``, float32
    ``[kinds, rows]``. The result is ``[kinds, start]``. Rows that are ``absent``, ``[start]``, are
    not seen. ``sinks``, ``[heads]``: one more score of each head. None if there is no kernel for
    this KV."""
    if not serves(kv.shape):
        return None
    library = native.library(kv.shape.dtype)
    start, query = len(absent), query[0]
    keys = kv.layer(layer, 0, start + query.shape[1])[0][0]
    query = query if query.stride(2) == 1 else query.contiguous()
    (heads, rows, dim), kv_heads = query.shape, len(keys)
    hidden = absent.new_zeros(start + rows + LANES)
    hidden[:start] = absent
    kinds, sinks = len(weights), None if sinks is None else sinks.float()
    mass = torch.empty(kinds, start, dtype=torch.float32, device="cpu")
    threads = min(torch.get_num_threads(), heads)  # each thread holds the scores of a long prompt
    workspaces = scratch(threads * library.kvboost_mass_bytes(start, rows, kinds), torch.uint8)
    call = _MassCall(
        *(query.data_ptr(), query.stride(0), query.stride(1)),
        *(keys.data_ptr(), keys.stride(0), hidden.data_ptr(), weights.data_ptr()),
        address_of(sinks),
        *(heads, kv_heads, dim, start, rows, kinds, scale),
    )
    library.kvboost_attention_mass(
        ctypes.addressof(call), mass.data_ptr(), workspaces.data_ptr(), threads
    )
    return mass


def errors(
    kv: LayerRows, layer: int, keys: torch.Tensor, values: torch.Tensor, rows: RecomputedRows
) -> tuple[torch.Tensor, torch.Tensor]:
    """The differences between fresh ``keys`` and ``values``, ``[1, kv_heads, segment, dim]``, and
    those in ``kv``, of some ``rows``, added up block by block: of keys times cos and times sin of
    their rows, and of values; float32 ``[3, kv_heads, blocks, dim]``. Rows with large errors count
    less; what the rows of each block count is float32 ``[2, kv_heads, blocks]``, as keys and as
    values."""
    known_keys, known_values = (part[0] for part in kv.layer(layer, 0, rows.end))
    heads, dim = known_keys.shape[0], keys.shape[3]
    sums = torch.zeros(3, heads, rows.num_blocks, dim, dtype=torch.float32, device=keys.device)
    counts = sums.new_zeros(2, heads, rows.num_blocks)
    if not serves(kv.shape):
        of_keys, of_values = (
            fresh[0].index_select(1, rows.index).float()
            - known.index_select(1, rows.positions).float()
            for fresh, known in ((keys, known_keys), (values, known_values))
        )
        weights = _row_weights(torch.stack([of_keys, of_values]).square().sum(3), rows)
        of_keys, of_values = of_keys * weights[0, ..., None], of_values * weights[1, ..., None]
        for sum, part in zip(
            sums, (of_keys * rows.cos, of_keys * rows.sin, of_values), strict=True
        ):
            sum.index_add_(1, rows.which, part)
        return sums, counts.index_add_(2, rows.which, weights)
    keys, values = (part if part.stride(3) == 1 else part.contiguous() for part in (keys, values))
    indices = [part.contiguous() for part in (rows.index, rows.positions, rows.which)]
    factors = [part.float().contiguous() for part in (rows.cos, rows.sin)]
    weights = sums.new_empty(2, heads, len(rows.index))
    native.library(kv.shape.dtype).kvboost_errors(
        *(keys.data_ptr(), keys.stride(1), keys.stride(2)),
        *(values.data_ptr(), values.stride(1), values.stride(2)),
        *(known_keys.data_ptr(), known_values.data_ptr(), known_keys.stride(0)),
        *(heads, dim, rows.num_blocks, rows.span_blocks, len(rows.index)),
        *(part.data_ptr() for part in (*indices, *factors)),
        *(rows.error_weight, weights.data_ptr(), sums.data_ptr()),
        torch.get_num_threads(),
    )
    return sums, counts.index_add_(2, rows.which, weights)


def _row_weights(squares: torch.Tensor, rows: RecomputedRows) -> torch.Tensor:
    """The weight of each row, given its squared errors, ``[2, kv_heads, rows]``."""
    span = rows.which // rows.span_blocks
    of_spans = squares.new_zeros(*squares.shape[:2], rows.num_blocks // rows.span_blocks)
    totals = of_spans.index_add(2, span, squares)
    means = totals / of_spans.index_add(2, span, torch.ones_like(squares)).clamp(min=1)
    return 1 / (1 + rows.error_weight * squares / means.clamp(min=1e-30).index_select(2, span))


def shift(
    kv: LayerRows,
    layer: int,
    start: int,
    which: torch.Tensor,
    keys: tuple[torch.Tensor, torch.Tensor],
    rotation: tuple[torch.Tensor, torch.Tensor],
    values: torch.Tensor,
) -> None:
    """Adds one of several offsets to each row of ``kv`` from ``start`` on: offset ``which``,
    ``[rows]``; the last one means none. Offsets are float32 ``[kv_heads, offsets, dim]``: those of
    keys along and across ``rotation``, the cosine and sine ``[rows, dim]``, and those of values.
    The rows must be the request's own."""
    with kv.changing(layer, start, start + len(which)) as (own_keys, own_values):
        add = _add_by_kernel if serves(kv.shape) else _add
        add((own_keys[0], own_values[0]), which, keys, rotation, values)


Pair = tuple[torch.Tensor, torch.Tensor]


def _add(own: Pair, which: torch.Tensor, keys: Pair, rotation: Pair, values: torch.Tensor) -> None:
    """As :func:`shift`; ``own`` are keys and values, ``[kv_heads, rows, dim]``."""
    own_keys, own_values = own
    dtype = own_keys.dtype
    along, across = (part.to(dtype).index_select(1, which) for part in keys)
    own_keys.add_(along.mul_(rotation[0]).addcmul_(across, rotation[1]))
    if own_values.data_ptr() != own_keys.data_ptr():  # else each row is both
        own_values.add_(values.to(dtype).index_select(1, which))


def _add_by_kernel(
    own: Pair, which: torch.Tensor, keys: Pair, rotation: Pair, values: torch.Tensor
) -> None:
    """As :func:`_add`."""
    own_keys, own_values = own
    dtype = own_keys.dtype
    heads, offsets, dim = values.shape
    read = [part.float().contiguous() for part in (*keys, values)]
    read += [part.to(dtype).contiguous() for part in rotation]
    native.library(dtype).kvboost_shift(
        *(own_keys.data_ptr(), own_values.data_ptr(), own_keys.stride(0)),
        *(heads, dim, len(which), which.data_ptr(), offsets),
        *(part.data_ptr() for part in read),
        torch.get_num_threads(),
    )


def move_keys(
    keys: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
) -> bool:
    """Writes ``keys``, ``[layers, kv_heads, tokens, dim]``, with channels ``(i, i + pairs)``
    rotated by cosine and sine, ``[layers, pairs]``, into ``out``. Returns False if there is no
    kernel for these tensors; then nothing is written."""
    cos, sin = (part.contiguous() for part in rotation)
    layers, heads, tokens, dim = keys.shape
    pairs = cos.shape[1]
    alike = (keys.dtype, keys.shape, keys.device) == (out.dtype, out.shape, out.device)
    fits = alike and all(part.stride()[2:] == (dim, 1) for part in (keys, out))
    fits = fits and pairs % LANES == 0 and 2 * pairs <= dim
    fits = fits and all(
        part.shape == (layers, pairs) and part.dtype == torch.float32 for part in (cos, sin)
    )
    if not (fits and native.is_available(keys.dtype, keys.device)):
        return False
    native.library(keys.dtype).kvboost_move(
        *(keys.data_ptr(), keys.stride(0), keys.stride(1)),
        *(out.data_ptr(), out.stride(0), out.stride(1)),
        *(layers, heads, tokens, dim, pairs),
        *(cos.data_ptr(), sin.data_ptr(), torch.get_num_threads()),
    )
    return True
