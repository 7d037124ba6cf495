"""Our attention function: each segment over its own request's KV, masked by position.

Registered with transformers' ``AttentionInterface``. The name has no mask function, so the model
builds no mask; the rule ``key_position <= query_position`` (and the layer's window) is applied
here, which stays right when a segment's positions have gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import torch
from torch.nn.attention.bias import CausalBias, causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvboost.errors import UnsupportedModelError
from kvboost.model import shared_attention
from kvboost.model.kv import RequestKV
from kvboost.model.native.kernels import Kernels, Plan

NAME = "kvboost"
BLOCK_ROWS = 512
GRID = 64
"""For 16-bit numbers on a CPU, torch compiles a kernel for every number of rows and keys it meets
and keeps them all. Behind ever new hits there would be no end to that, so they are rounded up."""
BATCH = "kvboost_batch"
"""The attribute of the fresh keys that tells ``attend`` whose rows they are. Keyword arguments of
the model's call would be the ordinary way, but not every architecture hands them down."""


class StopForward(Exception):
    """The layers above are not wanted."""


class Hook(Protocol):
    """Sees one segment on its way through the layers, and may change what ``kv`` holds of rows
    that are not the segment's own."""

    def on_fresh(self, layer: int, kv: RequestKV, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Before the segment's fresh rows, ``[1, kv_heads, rows, dim]``, are written over what
        ``kv`` holds at their positions."""

    def on_query(
        self, layer: int, kv: RequestKV, query: torch.Tensor, scale: float, window: int | None
    ) -> None:
        """Before attention of ``query``, ``[1, heads, rows, dim]``; fresh rows are in place."""


@dataclass
class Segment:
    """Tokens of one request that go through the model together.

    ``positions`` is a ``range`` where they follow one another, else an increasing tensor. Every
    row of ``kv`` below the last position must be written before, or by this segment itself,
    unless it is ``absent``: ``[end]``, true for rows that no query may look at.
    Logits are wanted of the last ``num_logits`` rows. With ``until`` the forward ends in that
    layer, once its fresh rows are written and the hook has seen its queries; there are no logits.
    ``as_stock``: by itself, from its first token on, it attends by the very calls that stock
    transformers makes.
    """

    kv: RequestKV
    token_ids: torch.Tensor
    positions: range | torch.Tensor
    num_logits: int = 1
    hook: Hook | None = None
    absent: torch.Tensor | None = None
    until: int | None = None
    as_stock: bool = True
    _blocks: dict[int | None, list[Block]] = field(default_factory=dict, repr=False)
    _own_mask: torch.Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        device = self.kv.shape.device
        self._num_rows = len(self.token_ids)  # asked for in every layer
        self.token_ids = self.token_ids.to(device)
        if isinstance(self.positions, torch.Tensor):
            self.positions = self.positions.to(device)

    def __len__(self) -> int:
        return self._num_rows

    @property
    def first(self) -> int:
        return int(self.positions[0])

    @property
    def end(self) -> int:
        """One past the last position: keys are rows ``[0, end)``."""
        return int(self.positions[-1]) + 1

    def position_ids(self, device: torch.device) -> torch.Tensor:
        if isinstance(self.positions, range):
            return torch.arange(self.positions.start, self.positions.stop, device=device)
        return self.positions

    @property
    def is_plain(self) -> bool:
        """A sequence's next rows, which look at everything before them."""
        return isinstance(self.positions, range) and self.absent is None

    def hides(self, window: int | None) -> int | None:
        """The window of a layer, if it hides anything from this segment."""
        return window if window and self.end > window else None

    @cached_property
    def corner(self) -> CausalBias | None:
        """The mask of a sequence's last rows, as GPU kernels know it; one row needs none."""
        return causal_lower_right(len(self), self.end) if len(self) > 1 else None

    def own_mask(self, groups: int, like: torch.Tensor) -> torch.Tensor:
        """The mask over the request's own rows, for queries of ``groups`` heads below one another:
        additive ``[groups * rows, keys]``, on the grid; made once a forward."""
        if self._own_mask is None:
            rows = self.position_ids(like.device) - self.kv.own_start
            self._own_mask = Block.of(0, rows, None, like).mask.repeat(groups, 1)
        return self._own_mask

    def blocks(self, window: int | None, like: torch.Tensor) -> list[Block]:
        """The rows in blocks, each with the keys it may look at; made once a forward."""
        if window not in self._blocks:
            positions = self.position_ids(like.device)
            self._blocks[window] = [
                Block.of(start, positions[start : start + BLOCK_ROWS], window, like, self.absent)
                for start in range(0, len(self), BLOCK_ROWS)
            ]
        return self._blocks[window]


@dataclass
class Batch:
    """Segments that go through the model packed into one row."""

    segments: Sequence[Segment]
    kernels: Kernels | None = None
    """Ours, where the machine has them; else torch's serve."""

    @cached_property
    def is_looked_at(self) -> bool:
        """Whether somebody looks at the rows on their way."""
        return any(s.hook is not None or s.until is not None for s in self.segments)

    @cached_property
    def plan(self) -> Plan:
        return Plan(self.segments, self.segments[0].kv.shape)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Puts fresh rows, ``[1, kv_heads, total, dim]``, into each request's KV; hooks see them
        before."""
        if self.kernels is None or self.is_looked_at:
            split_keys, split_values = (split(rows, self.segments) for rows in (keys, values))
            for segment, k, v in zip(self.segments, split_keys, split_values, strict=True):
                if segment.hook is not None:
                    segment.hook.on_fresh(layer, segment.kv, k, v)
                if self.kernels is None:
                    segment.kv.write(layer, segment.positions, k, v)
        if self.kernels is not None:
            self.kernels.write(self.plan, layer, keys, values)

    def show(
        self, layer: int, query: torch.Tensor, scale: float, window: int | None = None
    ) -> None:
        """Has hooks see ``[1, heads, total, dim]``; ends the forward where it shall end."""
        if not self.is_looked_at:
            return
        for segment, q in zip(self.segments, split(query, self.segments), strict=True):
            if segment.hook is not None:
                segment.hook.on_query(layer, segment.kv, q, scale, segment.hides(window))
            if segment.until == layer:
                raise StopForward


@dataclass(frozen=True)
class Block:
    """Rows ``[start, end)`` of a segment and the keys ``[first_key, end_key)`` they may look at.
    Attending block by block leaves out most of what the mask would hide anyway."""

    start: int
    end: int
    first_key: int
    end_key: int
    mask: torch.Tensor
    """Additive ``[rows, keys]``, its width padded in memory to a multiple of 8 as the GPU's
    kernels want it. On the grid there are more rows and keys than needed; such keys are hidden."""

    @classmethod
    def of(
        cls,
        start: int,
        positions: torch.Tensor,
        window: int | None,
        like: torch.Tensor,
        absent: torch.Tensor | None = None,
    ) -> Block:
        first, last = int(positions[0]), int(positions[-1])
        grid = _grid(like)
        first_key = 0 if window is None else max(0, first + 1 - window) // grid * grid
        end_key = _up(last + 1, grid)
        keys = torch.arange(first_key, end_key, device=like.device)
        queries = positions[:, None]
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        if absent is not None:
            hidden[:, : last + 1 - first_key] |= absent[first_key : last + 1]
        rows, width = _up(len(positions), grid), _up(len(keys), 8)
        mask = torch.zeros(rows, width, dtype=like.dtype, device=like.device)[:, : len(keys)]
        mask[: len(positions)].masked_fill_(hidden, float("-inf"))
        return cls(start, start + len(positions), first_key, end_key, mask)


def _grid(like: torch.Tensor) -> int:
    return GRID if like.device.type == "cpu" and like.dtype.itemsize == 2 else 1


def _up(length: int, grid: int) -> int:
    return -(-length // grid) * grid


def split(rows: torch.Tensor, segments: Sequence[Segment]) -> Sequence[torch.Tensor]:
    """Packed ``[1, heads, total, dim]`` as one tensor per segment."""
    if len(segments) == 1:
        return (rows,)
    return rows.split([len(segment) for segment in segments], dim=2)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of packed segments. ``query`` is ``[1, heads, total, dim]``; ``key`` and ``value``
    are the fresh rows, which the cache's ``update`` has already written to each request's KV, and
    ``key`` says whose they are. Returns ``[1, total, heads, dim]``."""
    batch: Batch | None = getattr(key, BATCH, None)
    if batch is None:
        raise RuntimeError(
            "this model's attention is bound to KVBoost; call it through the engine, or give it "
            "back to transformers with model.set_attn_implementation('sdpa')"
        )
    for unsupported in ("s_aux", "position_bias"):
        if kwargs.get(unsupported) is not None:
            raise UnsupportedModelError(f"attention with {unsupported} is not supported")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    batch.show(layer, query, scale, sliding_window)
    segments = batch.segments
    windowed = any(segment.hides(sliding_window) for segment in segments)
    if batch.kernels is not None and softcap is None and not windowed:
        return batch.kernels.attend(batch.plan, layer, query, scale), None
    queries = split(query, segments)
    outputs: dict[int, torch.Tensor] = {}
    if softcap is None:
        outputs = shared_attention.attend_groups(queries, segments, layer, scale, sliding_window)
    fresh = zip(segments, queries, split(key, segments), split(value, segments), strict=True)
    for index, (segment, q, k, v) in enumerate(fresh):
        if index not in outputs:
            window = segment.hides(sliding_window)
            outputs[index] = _attend_segment(segment, q, k, v, layer, scale, window, softcap)
    rows_first = [outputs[index].transpose(1, 2) for index in range(len(segments))]
    packed = rows_first[0] if len(rows_first) == 1 else torch.cat(rows_first, dim=1)
    return packed.contiguous(), None


def _attend_segment(
    segment: Segment,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attention of one segment, by the fastest of torch's kernels that knows its mask."""
    rows, on_cpu = len(segment), query.device.type == "cpu"
    if not segment.is_plain or window is not None or softcap is not None:
        return _attend_blocks(query, segment, layer, window, scale, softcap)
    if segment.first == 0:
        # A sequence from its first token on: the very call stock transformers makes.
        if rows > 1 and (more := _up(rows, _grid(query)) - rows):
            query, key, value = (
                torch.nn.functional.pad(x, (0, 0, 0, more)) for x in (query, key, value)
            )
        out = sdpa(query, key, value, is_causal=rows > 1, scale=scale, enable_gqa=True)
        return out[:, :, :rows]
    keys, values = segment.kv.layer(layer, 0, segment.end)
    if rows == 1 and on_cpu:
        return shared_attention.attend_part(query, keys, values, scale)[0]
    if query.device.type == "cuda":
        return sdpa(query, keys, values, attn_mask=segment.corner, scale=scale, enable_gqa=True)
    if segment.first <= rows:
        return _attend_padded(query, segment, layer, scale)
    return _attend_blocks(query, segment, layer, window, scale, softcap)


def _attend_padded(query: torch.Tensor, segment: Segment, layer: int, scale: float) -> torch.Tensor:
    """A segment behind a shorter beginning, as if that were asked too: the kernel that knows
    causality by itself does both in less time than the one with a mask does the segment alone."""
    end = _up(segment.end, _grid(query))
    keys, values = segment.kv.layer(layer, 0, end)
    padded = torch.nn.functional.pad(query, (0, 0, segment.first, end - segment.end))
    out = sdpa(padded, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    return out[:, :, segment.first : segment.end]


def _attend_blocks(
    query: torch.Tensor,
    segment: Segment,
    layer: int,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """A segment with an explicit mask, block by block."""
    outputs = []
    for block in segment.blocks(window, query):
        keys, values = segment.kv.layer(layer, block.first_key, block.end_key)
        q = query[:, :, block.start : block.end]
        rows, more = q.shape[2], block.mask.shape[0] - q.shape[2]
        if more:
            q = torch.nn.functional.pad(q, (0, 0, 0, more))
        if softcap is not None:
            out = _softcapped(q, keys, values, block.mask, scale, softcap)
        elif query.device.type == "cuda":  # its kernels with a mask know no grouped queries
            folded, mask = _fold(q, keys.shape[1], block.mask)
            out = sdpa(folded, keys, values, attn_mask=mask, scale=scale).reshape(q.shape)
        else:
            out = sdpa(q, keys, values, attn_mask=block.mask, scale=scale, enable_gqa=True)
        outputs.append(out[:, :, :rows])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _fold(
    query: torch.Tensor, num_kv_heads: int, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Grouped queries as more rows of their KV head."""
    _, heads, rows, dim = query.shape
    groups = heads // num_kv_heads
    folded = query.reshape(1, num_kv_heads, groups * rows, dim)
    return folded, mask.expand(groups, *mask.shape).reshape(groups * rows, -1)


def _softcapped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Attention written out, for logits that pass through ``softcap * tanh(x / softcap)``."""
    folded, mask = _fold(query, keys.shape[1], mask)
    weights = torch.matmul(folded, keys.transpose(2, 3)) * scale
    weights = torch.tanh(weights / softcap) * softcap + mask
    weights = torch.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, values).reshape(query.shape)
