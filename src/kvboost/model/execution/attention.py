"""Our attention function: each segment attends to its own request's KV, masked by position.

Registered with transformers' ``AttentionInterface``. The name has no mask function, so the model
builds no mask. The rule ``key_position <= query_position`` (and the layer's window) is applied
here, so it also holds when a segment's positions have gaps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvboost.errors import UnsupportedModelError
from kvboost.model.execution import shared_attention
from kvboost.model.execution.partial_attention import MOST_WEIGHTS, attend_part, count_sinks
from kvboost.model.execution.segment import (
    ChunkWindow,
    Rules,
    Segment,
    round_up,
    rows_first,
    split,
)
from kvboost.model.execution.traits import GRID
from kvboost.model.native.kernels import Kernels, Plan

if TYPE_CHECKING:
    from kvboost.model.execution.latent import LatentAttention

NAME = "kvboost"
ALONE = "kvboost_alone"
STEP = "kvboost_step"
WINDOWS_IN_MASKS = ("llama4_text", "phimoe", "qwen2_moe")
"""Model types whose layers have windows and do not pass them on to their attention."""
IGNORES_WINDOW = "olmoe"
"""A model type that passes the window in its config on, while its mask lets rows see all of the
text: those are its answers, and only kernels that get no mask would give others."""
BATCH = "kvboost_batch"
"""The attribute of the fresh keys that tells ``attend`` which batch and layer they belong to.
Keyword arguments of the model's call would be the ordinary way, but not every architecture passes
them on, and some layers attend to the keys of an earlier one."""


Read = Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]
"""Gives keys and values in rows ``[start, end)``, ``[1, kv_heads, rows, head_dim]``."""

MOST_FOLDED = 1 << 24
"""Numbers of a mask that is repeated for all heads on a CPU."""
OWN = "kvboost_attention"
"""The attribute of an attention module that has latents (``latent.py``)."""


class StopForward(Exception):
    """Ends a forward: no segment needs the layers above. A hook may raise it to say so of its
    own."""


@dataclass
class Batch:
    """Segments that go through the model packed into one row."""

    segments: Sequence[Segment]
    kernels: Kernels | None = None
    """Ours, if they serve this model on this machine; otherwise torch's run."""
    between_parts: Callable[[], None] | None = None
    """Called before each layer's attention, and where torch attends also after it."""
    _ended: set[int] = field(default_factory=set, init=False)
    """The segments that need no further layer, and whose hooks see none."""
    is_fused = False
    """Whether layers of ours may run it over pages: nothing has to happen between the parts of a
    layer, and no result has to equal that of the model's own layers to the last bit."""

    _parts: dict[tuple[int, ...], Batch] = field(default_factory=dict, repr=False)

    @cached_property
    def has_hooks(self) -> bool:
        """Whether something must happen between the parts of a layer."""
        return any(s.hook is not None or s.until is not None for s in self.segments)

    @cached_property
    def plan(self) -> Plan:
        return Plan(self.segments, self.segments[0].kv.shape)

    @cached_property
    def offsets(self) -> torch.Tensor:
        """By how much the position of each row differs from its number, ``[total]``."""
        device = self.segments[0].kv.shape.device
        positions = torch.cat([segment.position_ids(device) for segment in self.segments])
        return positions - torch.arange(len(positions), device=device)

    def part(self, indices: Sequence[int]) -> Batch:
        """A batch of some of its segments, the same one in every layer."""
        key = tuple(indices)
        if key not in self._parts:
            self._parts[key] = self._of([self.segments[index] for index in key])
        return self._parts[key]

    def _of(self, segments: Sequence[Segment]) -> Batch:
        return Batch(segments, self.kernels, self.between_parts)

    def pause(self) -> None:
        """Lets others run between two parts of the forward."""
        if self.between_parts is not None:
            self.between_parts()

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes fresh rows, ``[1, kv_heads, total, dim]``, into each request's KV. Hooks see them
        first."""
        self.show_fresh(layer, keys, values)
        if self.kernels is not None:
            self.kernels.write(self.plan, layer, keys, values)
            return
        split_keys, split_values = (split(rows, self.segments) for rows in (keys, values))
        for segment, k, v in zip(self.segments, split_keys, split_values, strict=True):
            segment.kv.write(layer, segment.positions, k, v)

    def show_fresh(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Shows fresh rows to the hooks, each those of its segment."""
        if not self.has_hooks:
            return
        split_keys, split_values = (split(rows, self.segments) for rows in (keys, values))
        for index, segment in enumerate(self.segments):
            if segment.hook is not None and index not in self._ended:
                fresh = rows_first(split_keys[index]), rows_first(split_values[index])
                segment.hook.on_fresh(layer, *fresh)

    def show(self, layer: int, query: torch.Tensor, rules: Rules) -> None:
        """Shows ``[1, heads, total, dim]`` to the hooks, each the rows of its segment. Raises
        StopForward once no segment needs the layers above."""
        if not self.has_hooks:
            return
        for index, (segment, q) in enumerate(
            zip(self.segments, split(query, self.segments), strict=True)
        ):
            if index in self._ended:
                continue
            try:
                if segment.hook is not None:
                    segment.hook.on_query(layer, rows_first(q), segment.narrow(rules))
            except StopForward:  # it has seen enough; others may not have
                self._ended.add(index)
            if segment.until == layer:
                self._ended.add(index)
        if len(self._ended) == len(self.segments):
            raise StopForward

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rules: Rules
    ) -> torch.Tensor:
        """Attention of ``query``, ``[1, heads, total, dim]``; returns ``[1, total, heads, dim]``.
        ``key`` and ``value`` are the fresh rows, which have been written."""
        segments = self.segments
        windowed = any(segment.hides(rules.window) for segment in segments)
        if self.kernels is not None and rules.softcap is None and not windowed:
            return self.kernels.attend(self.plan, layer, query, rules.scale, rules.sinks)
        queries = split(query, segments)
        outputs: dict[int, torch.Tensor] = {}
        if rules.softcap is None:
            outputs = shared_attention.attend_groups(queries, segments, layer, rules)
        fresh = zip(segments, queries, split(key, segments), split(value, segments), strict=True)
        for index, (segment, q, k, v) in enumerate(fresh):
            if index not in outputs:
                read = partial(segment.kv.layer, layer)
                outputs[index] = attend_segment(segment, q, k, v, read, segment.narrow(rules))
        rows_first = [outputs[index].transpose(1, 2) for index in range(len(segments))]
        packed = rows_first[0] if len(rows_first) == 1 else torch.cat(rows_first, dim=1)
        return packed.contiguous()


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of packed segments. ``query`` is ``[1, heads, total, dim]``; ``key`` and ``value``
    are the fresh rows, which the cache's ``update`` has already written to each request's KV;
    ``key`` carries the batch. ``s_aux`` is transformers' name for attention sinks, ``[heads]``.
    Returns ``[1, total, heads, dim]``."""
    belongs: tuple[Batch, int] | None = getattr(key, BATCH, None)
    if belongs is None:
        raise RuntimeError(
            "this model's attention is bound to KVBoost; call it through the engine, or give it "
            "back to transformers with model.set_attn_implementation('sdpa')"
        )
    if kwargs.get("position_bias") is not None:
        raise UnsupportedModelError("attention with position_bias is not supported")
    if s_aux is not None and softcap is not None:
        raise UnsupportedModelError("attention with both sinks and a soft cap is not supported")
    batch, layer = belongs
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    own: LatentAttention | None = vars(module).get(OWN)
    if own is not None:
        out = own.attend(batch, layer, query, key, scale)
        batch.pause()
        return out, None
    window = _window_of(module, sliding_window)
    # A rank of a model that is split has the sinks of its heads, as part of all of them.
    to_local = getattr(s_aux, "to_local", None)
    sinks = s_aux if to_local is None else to_local()
    rules = Rules(scale, window, softcap, sinks)
    batch.show(layer, query, rules)
    out = batch.attend(layer, query, key, value, rules)
    batch.pause()
    return out, None


def attend_step(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As :func:`attend`, for a model that computes one row of each request as a sequence of its
    own: ``query`` is ``[requests, heads, 1, dim]``, the result ``[requests, 1, heads, dim]``."""
    out, _ = attend(module, query.transpose(0, 2), key, value, attention_mask, **kwargs)
    return out.transpose(0, 1), None


def attend_alone(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *_: Any,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of tokens that stand alone, ``[tokens, heads, 1, dim]``: each has its own value.
    Sinks do not count. What a token gets is the same at every position to the last bit, while a
    score, and with it the share of a sink, is rounded otherwise at each: experts that are nearly
    as good as one another would change places."""
    groups = query.shape[1] // value.shape[1]
    return value.repeat_interleave(groups, 1).transpose(1, 2).contiguous(), None


def _window_of(module: torch.nn.Module, passed: int | None) -> int | None:
    """The window in a layer's mask, which we never see; most layers have also ``passed`` it on."""
    config: Any = getattr(module, "config", None)
    kind = getattr(config, "model_type", None)
    if kind == IGNORES_WINDOW:
        return None
    if passed or kind not in WINDOWS_IN_MASKS:
        return passed
    kinds: Any = getattr(config, "layer_types", None)
    of_layer = kinds[module.layer_idx] if kinds else "sliding_attention"
    if of_layer == "chunked_attention":
        return ChunkWindow(config.attention_chunk_size)
    return config.sliding_window if of_layer == "sliding_attention" else None


def attend_segment(
    segment: Segment,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    read: Read,
    rules: Rules,
) -> torch.Tensor:
    """Attention of one segment, by the fastest of torch's kernels that knows its mask; with sinks,
    by those that also tell the log-sum-exp. ``read`` gives the rows of its KV. ``key`` and
    ``value`` are the fresh rows, which are used if they are all there are."""
    scale, window, softcap, sinks, _ = rules
    rows, shape = len(segment), segment.kv.shape.of(0)
    traits = shape.traits
    # GPUs have no kernels for so wide rows, and torch would copy them for each query head.
    is_wide = shape.sides == 1 and query.shape[3] > traits.most_dim
    is_written_out = sinks is not None or is_wide
    is_masked = not segment.is_plain or window is not None or softcap is not None
    if is_masked or (is_written_out and rows > 1):
        return _attend_blocks(query, segment, read, rules)
    if segment.first == 0 and not is_written_out:
        # A sequence from its first token: the very call that stock transformers makes.
        if rows > 1 and (more := round_up(rows, shape.grid) - rows):
            query, key, value = (
                torch.nn.functional.pad(x, (0, 0, 0, more)) for x in (query, key, value)
            )
        out = sdpa(query, key, value, is_causal=rows > 1, scale=scale, enable_gqa=True)
        return out[:, :, :rows]
    keys, values = read(0, segment.end)
    if rows == 1 and (traits.takes_rows_in_parts or is_written_out):
        return count_sinks(attend_part(query, keys, values, scale), sinks)
    if traits.knows_corners:
        return sdpa(query, keys, values, attn_mask=segment.corner, scale=scale, enable_gqa=True)
    if segment.first <= rows:
        return _attend_padded(query, segment, read, scale)
    return _attend_blocks(query, segment, read, rules)


def _attend_padded(query: torch.Tensor, segment: Segment, read: Read, scale: float) -> torch.Tensor:
    """A segment after a shorter prefix, padded as if the prefix were computed too: torch's causal
    kernel does both in less time than its masked kernel does the segment alone."""
    end = round_up(segment.end, segment.kv.shape.grid)
    keys, values = read(0, end)
    padded = torch.nn.functional.pad(query, (0, 0, segment.first, end - segment.end))
    out = sdpa(padded, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    return out[:, :, segment.first : segment.end]


def _attend_blocks(query: torch.Tensor, segment: Segment, read: Read, rules: Rules) -> torch.Tensor:
    """A segment with an explicit mask, block by block."""
    scale, window, softcap, sinks, _ = rules
    outputs = []
    for block in segment.blocks(window, query):
        keys, values = read(block.first_key, block.end_key)
        q = query[:, :, block.start : block.end]
        rows, more = q.shape[2], block.mask.shape[0] - q.shape[2]
        if more:
            q = torch.nn.functional.pad(q, (0, 0, 0, more))
        if sinks is not None:
            out = _with_sinks(q, keys, values, block.mask, scale, sinks)
        elif softcap is not None:
            out = _softcapped(q, keys, values, block.mask, scale, softcap)
        elif segment.kv.shape.traits.folds_masked or _folds(q, keys):
            # On CPUs, one head of keys is read once for all queries.
            folded, mask = _fold(q, keys.shape[1], block.mask)
            out = sdpa(folded, keys, values, attn_mask=mask, scale=scale).reshape(q.shape)
        else:
            out = sdpa(q, keys, values, attn_mask=block.mask, scale=scale, enable_gqa=True)
        outputs.append(out[:, :, :rows])
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


def _folds(query: torch.Tensor, keys: torch.Tensor) -> bool:
    """Whether all queries of a few rows become rows of one matrix: one head of keys serves them."""
    heads, rows = query.shape[1:3]
    return keys.shape[1] == 1 and heads * rows * keys.shape[2] <= MOST_FOLDED


def _with_sinks(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scale: float,
    sinks: torch.Tensor,
) -> torch.Tensor:
    """Attention with sinks. Takes a few rows at a time: the mask is repeated for the heads that
    share a head of keys."""
    groups = query.shape[1] // keys.shape[1]
    rows = max(1, MOST_WEIGHTS // (groups * keys.shape[2]) // GRID) * GRID
    outputs = []
    for some, hidden in zip(query.split(rows, 2), mask.split(rows), strict=True):
        part = attend_part(some, keys, values, scale, hidden.repeat(groups, 1))
        outputs.append(count_sinks(part, sinks))
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
