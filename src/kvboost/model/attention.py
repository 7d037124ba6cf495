"""Our attention function: each segment over its own request's KV, masked by position.

Registered with transformers' ``AttentionInterface``. The name has no mask function, so the model
builds no mask; the rule ``key_position <= query_position`` (and the layer's window) is applied
here, which stays right when a segment's positions have gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvboost.model.kv import RequestKV

NAME = "kvboost"
SEGMENTS = "kvboost_segments"
"""The attribute of the fresh keys that tells ``attend`` whose rows they are. Keyword arguments of
the model's call would be the ordinary way, but not every architecture hands them down."""


@dataclass
class Segment:
    """Tokens of one request that go through the model together.

    ``positions`` is a ``range`` where they follow one another, else an increasing tensor. Every
    row of ``kv`` below the last position must be written before, or by this segment itself.
    Logits are wanted of the last ``num_logits`` rows.
    """

    kv: RequestKV
    token_ids: torch.Tensor
    positions: range | torch.Tensor
    num_logits: int = 1
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.token_ids)

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

    def mask(self, window: int | None, like: torch.Tensor) -> torch.Tensor:
        """Additive ``[rows, keys]`` for keys ``[first_key(window), end)``; made once a forward.

        The width is padded in memory to a multiple of 8, which the GPU's kernels want.
        """
        if window not in self._masks:
            start = self.first_key(window)
            keys = torch.arange(start, self.end, device=like.device)
            queries = self.position_ids(like.device)[:, None]
            hidden = keys > queries
            if window is not None:
                hidden |= keys <= queries - window
            width = -(-len(keys) // 8) * 8
            padded = torch.zeros(len(self), width, dtype=like.dtype, device=like.device)
            self._masks[window] = padded[:, : len(keys)].masked_fill_(hidden, float("-inf"))
        return self._masks[window]

    def first_key(self, window: int | None) -> int:
        """The first row that any query of this segment may look at."""
        return 0 if window is None else max(0, self.first + 1 - window)


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
    segments: Sequence[Segment] | None = getattr(key, SEGMENTS, None)
    if segments is None:
        raise RuntimeError(
            "this model's attention is bound to KVBoost; call it through the engine, or give it "
            "back to transformers with model.set_attn_implementation('sdpa')"
        )
    for unsupported in ("s_aux", "position_bias"):
        if kwargs.get(unsupported) is not None:
            raise NotImplementedError(f"attention with {unsupported} is not supported")
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    outputs = []
    start = 0
    for segment in segments:
        rows = slice(start, start + len(segment))
        start = rows.stop
        q = query[:, :, rows]
        if _plain_prefill(segment, sliding_window, softcap):
            out = sdpa(
                q, key[:, :, rows], value[:, :, rows], is_causal=True, scale=scale, enable_gqa=True
            )
        else:
            first = segment.first_key(sliding_window)
            keys, values = segment.kv.layer(layer, first, segment.end)
            window = sliding_window if first > 0 or _cuts(segment, sliding_window) else None
            out = _attend_one(q, keys[None], values[None], segment, window, scale, softcap)
        outputs.append(out)
    packed = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    return packed.transpose(1, 2).contiguous(), None


def _cuts(segment: Segment, window: int | None) -> bool:
    """Whether the window hides any key that causality alone would show."""
    return window is not None and segment.end > window


def _plain_prefill(segment: Segment, window: int | None, softcap: float | None) -> bool:
    """A sequence from its first token on: the very call stock transformers makes, to the bit."""
    return (
        isinstance(segment.positions, range)
        and segment.first == 0
        and len(segment) > 1
        and softcap is None
        and not _cuts(segment, window)
    )


def _attend_one(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    segment: Segment,
    window: int | None,
    scale: float,
    softcap: float | None,
) -> torch.Tensor:
    """One segment over ``keys`` and ``values`` ``[1, kv_heads, keys, dim]``."""
    if softcap is not None:
        return _softcapped(query, keys, values, segment.mask(window, query), scale, softcap)
    if len(segment) == 1:  # one query sees every key there is
        return sdpa(query, keys, values, scale=scale, enable_gqa=True)
    if query.device.type != "cuda":
        mask = segment.mask(window, query)
        return sdpa(query, keys, values, attn_mask=mask, scale=scale, enable_gqa=True)
    if window is None and isinstance(segment.positions, range):
        bias = causal_lower_right(len(segment), keys.shape[2])
        return sdpa(query, keys, values, attn_mask=bias, scale=scale, enable_gqa=True)
    folded, mask = _fold(query, keys.shape[1], segment.mask(window, query))
    return sdpa(folded, keys, values, attn_mask=mask, scale=scale).view_as(query)


def _fold(
    query: torch.Tensor, num_kv_heads: int, mask: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Grouped queries as more rows of their KV head, for kernels that know no groups."""
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
    return torch.matmul(weights, values).view_as(query)
