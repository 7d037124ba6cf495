"""Attention of requests that share their first rows.

The queries of all these requests attend to the shared rows together, in one call; then each request
attends to its own rows. The two partial results are merged by their log-sum-exps, which equals one
pass over all rows except for rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.functional import pad

from kvboost.model.execution.partial_attention import (
    Part,
    attend_part,
    count_sinks,
    flash,
    has_flash,
    merge_parts,
)
from kvboost.model.execution.segment import Block, Rules, Segment

FOLDED_ROWS = 64
"""Up to so many rows, FlashAttention gets the query heads that share a head of keys as rows of one
matrix; of more rows it has tiles enough."""


def attend_groups(
    queries: Sequence[torch.Tensor], segments: Sequence[Segment], layer: int, rules: Rules
) -> dict[int, torch.Tensor]:
    """Attention of the segments that share rows, by their indices. Leaves out segments from which
    a window hides some of these rows, and a segment that is the only one on its rows and has
    them all in one buffer."""
    groups: dict[int, list[int]] = {}
    for index, segment in enumerate(segments):
        sees_all = segment.is_plain and not segment.hides(rules.window)
        if segment.kv.base is not None and sees_all:
            groups.setdefault(id(segment.kv.base), []).append(index)
    outputs: dict[int, torch.Tensor] = {}
    for members in groups.values():
        if len(members) > 1 or segments[members[0]].kv.start:
            own = [queries[index] for index in members]
            sharing = [segments[index] for index in members]
            together = _attend_group(own, sharing, layer, rules)
            outputs.update(zip(members, together, strict=True))
    return outputs


def _attend_group(
    queries: Sequence[torch.Tensor], segments: Sequence[Segment], layer: int, rules: Rules
) -> Sequence[torch.Tensor]:
    """Attends to the shared rows once for all, to each segment's own rows, and merges both."""
    base = segments[0].kv.base
    assert base is not None
    parts = [
        attend_own(query, segment, layer, rules.scale)
        for query, segment in zip(queries, segments, strict=True)
    ]
    query = torch.cat(list(queries), dim=2)
    own = (torch.cat([out for out, _ in parts], 2), torch.cat([weight for _, weight in parts], 2))
    merged = merge_parts(base.attend(layer, query, rules.scale), own)
    out = count_sinks(merged, rules.sinks).to(query.dtype)
    return out.split([len(segment) for segment in segments], 2)


def attend_own(query: torch.Tensor, segment: Segment, layer: int, scale: float) -> Part:
    """Attention of a segment over the rows that are not its base's."""
    rows, first = len(segment), segment.kv.own_start
    if segment.kv.base is not None and segment.kv.base.is_far:
        return _attend_near(query, segment, layer, scale)
    if rows == 1:
        keys, values = segment.kv.layer(layer, first, segment.end)
        return attend_part(query, keys, values, scale)
    groups = query.shape[1] // segment.kv.shape.of(layer).num_kv_heads
    mask = segment.own_mask(groups, query)
    keys, values = segment.kv.layer(layer, first, first + mask.shape[1])
    padded = pad(query, (0, 0, 0, mask.shape[0] // groups - rows))
    out, weight = attend_part(padded, keys, values, scale, mask)
    return out[:, :, :rows], weight[:, :, :rows]


def _attend_near(query: torch.Tensor, segment: Segment, layer: int, scale: float) -> Part:
    """As :func:`attend_own`, without a mask as large as rows times keys: over the rows before the
    segment's, and over its own."""
    kv, first = segment.kv, segment.kv.own_start
    if len(segment) == 1:
        return attend_dense(query, *kv.layer(layer, first, segment.end), scale)
    own = kv.layer(layer, segment.first, segment.end)
    found = attend_dense(query, *own, scale, causal=True)
    if segment.first == first:
        return found
    return merge_parts(attend_dense(query, *kv.layer(layer, first, segment.first), scale), found)


def attend_dense(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    *,
    causal: bool = False,
) -> Part:
    """Attention of ``[1, heads, rows, dim]`` over ``[1, kv_heads, keys, dim]``, by FlashAttention
    where there is one. If it is ``causal``, there are as many keys as rows."""
    rows, dim = query.shape[2:]
    if has_flash(query.device, query.dtype, dim):
        return _folded_flash(query, keys, values, scale, causal=causal)
    mask = None
    if causal:
        positions = torch.arange(rows, device=query.device)
        groups = query.shape[1] // keys.shape[1]
        mask = Block.of(0, positions, None, query).mask[:rows, :rows].repeat(groups, 1)
    return attend_part(query, keys, values, scale, mask)


def _folded_flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, *, causal: bool
) -> Part:
    heads, kv_heads, rows, dim = query.shape[1], keys.shape[1], *query.shape[2:]
    asked = query
    if rows <= FOLDED_ROWS and not causal:
        asked = query.reshape(1, kv_heads, heads // kv_heads * rows, dim)
    out, sums = flash(asked, keys, values, scale, causal)
    return out.reshape(query.shape), sums[:, :, : asked.shape[2]].reshape(1, heads, rows)
