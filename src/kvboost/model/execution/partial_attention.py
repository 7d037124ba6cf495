"""Attention to some of the keys, and the merging of such parts by their log-sum-exps."""

from __future__ import annotations

import torch

from kvboost.model.execution.traits import MOST_FLASH_DIM

MOST_WEIGHTS = 1 << 22
"""Attention weights of one head of keys that are held at once."""

Part = tuple[torch.Tensor, torch.Tensor]
"""The result of attending to some of the keys: ``[1, heads, rows, dim]`` and the log-sum-exp of the
weights, ``[1, heads, rows]`` in float32."""


def attend_part(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None = None,
) -> Part:
    """Attention of ``[1, heads, rows, dim]`` over some keys. Queries that share a head of keys
    become rows of one matrix: fewer, larger products. ``mask`` is additive, ``[groups * rows,
    keys]``."""
    heads, kv_heads, rows = query.shape[1], keys.shape[1], query.shape[2]
    folded = query.reshape(1, kv_heads, heads // kv_heads * rows, query.shape[3])
    if query.device.type == "cpu":
        out, weight = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            folded, keys, values, 0.0, False, attn_mask=mask, scale=scale
        )
    else:
        out, weight = _written_out(folded, keys, values, scale, mask)
    return out.reshape(query.shape), weight.reshape(1, heads, rows)


def has_flash(device: torch.device, dtype: torch.dtype, dim: int) -> bool:
    """Whether :func:`flash` attends with heads of ``dim`` there."""
    fits = dim % 8 == 0 and dim <= MOST_FLASH_DIM
    return device.type == "cuda" and dtype.itemsize == 2 and fits


def flash(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, causal: bool
) -> Part:
    """As :func:`attend_part`, by FlashAttention. If it is ``causal``, there are as many keys as
    rows."""
    run = torch.ops.aten._scaled_dot_product_flash_attention
    out, sums, *_ = run(query, keys, values, 0.0, causal, False, scale=scale)
    return out, sums


def _written_out(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
    mask: torch.Tensor | None,
) -> Part:
    """Written out, where no kernel returns the log-sum-exp. Takes a few queries at a time, so that
    memory is bounded."""
    rows = max(1, MOST_WEIGHTS // keys.shape[2])
    outputs, totals = [], []
    for start in range(0, query.shape[2], rows):
        some = query[:, :, start : start + rows]
        weights = torch.matmul(some, keys.transpose(2, 3)).float() * scale
        if mask is not None:
            weights += mask[start : start + rows]
        totals.append(weights.logsumexp(dim=-1, keepdim=True))
        outputs.append(torch.matmul((weights - totals[-1]).exp().to(values.dtype), values))
    return torch.cat(outputs, 2), torch.cat(totals, 2)[..., 0]


def merge_parts(first: Part, second: Part) -> Part:
    """Merges two parts, in float32, into one that can be merged again."""
    share = torch.sigmoid(first[1] - second[1])[..., None]
    out = torch.lerp(second[0].float(), first[0].float(), share)
    return out, torch.logaddexp(first[1], second[1])


def count_sinks(part: Part, sinks: torch.Tensor | None) -> torch.Tensor:
    """The attention of ``part``, which is to all keys, after the softmax has one more score for
    each head: ``sinks``, ``[heads]``, whose values are zero; None: there are none. Changes
    ``part``. To be called once, after all parts are merged."""
    out, weight = part
    return out if sinks is None else out.mul_(sink_shares(weight, sinks[:, None])[..., None])


def sink_shares(weight: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """The share that is left beside a sink to all keys, whose log-sum-exp is ``weight``."""
    return torch.sigmoid(weight - sinks)
