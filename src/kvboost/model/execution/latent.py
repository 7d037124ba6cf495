"""Latent attention (MLA): one row of a token serves as the key and the value of all heads.

Such a layer compresses a token to a latent, which holds the keys without positions and the values
of all heads, and to one part of a key that rotates and that all heads share. KVBoost stores both as
one row, ``[rotated part | latent]``. Attention has two forms with the same result:

- absorbed: queries are multiplied by the weights that would expand keys, and attend to the rows
  themselves, as if there were one head of keys. It costs the least for few queries.
- expanded: the rows of all keys are expanded to keys and values of all heads, as transformers does
  it. It costs the least for many queries.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import linear, pad

from kvboost.errors import UnsupportedModelError
from kvboost.model.execution.attention import OWN, Batch, attend_segment
from kvboost.model.execution.fast_layers import FrozenLinear, PackedLinear
from kvboost.model.execution.segment import Rules, Segment, round_up, split

if TYPE_CHECKING:
    from kvboost.model.adapters.adapter import Delta

EXPAND = "expand_kv"
"""The method by which transformers' modules expand rows."""
EXPANSION = "kv_b_proj"
"""The linear layer that does it."""
MOST_EXPANDED = 1 << 27
"""Numbers of expanded keys and values that are held at once: heads are expanded in groups."""
MOST_PAGED = 512
"""The widest latents of our kernels over pages."""
TOO_WIDE = "its latents are too wide, or too much of them rotates"
_PLAIN = (nn.Linear, FrozenLinear, PackedLinear)
"""Layers whose ``weight`` is what they multiply with."""


def join(latents: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
    """The rows to store, given both parts as transformers' modules give them to a cache. The
    rotated channels are the first, as in the keys of other models."""
    return torch.cat([rotated, latents], -1)


def fits_pages(rotated: int, latent: int) -> bool:
    """Whether kernels over pages take rows of these parts: they expect what rotates in the first
    half of a row."""
    return rotated <= latent <= MOST_PAGED


def latent_layers(model: nn.Module) -> list[LatentAttention]:
    """Our attention for each layer of a model with latents. Raises UnsupportedModelError if this
    version of transformers keeps expanded keys and values."""
    found = [
        LatentAttention(module, name)
        for name, module in model.named_modules()
        if callable(getattr(module, EXPAND, None))
    ]
    if not found:
        raise _is_old(type(model).__name__)
    return found


def check_latents(layer: int, latents: torch.Tensor, rotated: torch.Tensor) -> None:
    """Raises UnsupportedModelError if these, ``[tokens, heads, 1, width]``, are keys and values of
    several heads."""
    if (latents.shape[1], rotated.shape[1]) != (1, 1):
        raise _is_old(f"layer {layer}")


def _is_old(name: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{name} keeps expanded keys and values in this version of transformers, and KVBoost "
        "stores latents; install transformers 5.22 or later"
    )


class LatentAttention:
    """The attention of one layer. While it is bound, the module expands nothing: it gives stored
    rows to our attention function as they are."""

    def __init__(self, module: Any, name: str) -> None:
        self._module = module
        self.expansion = f"{name}.{EXPANSION}"
        """The path of the linear layer that expands rows."""
        self._heads: int = module.num_heads
        self._plain: int = module.qk_nope_head_dim
        self._rotated: int = module.qk_rope_head_dim
        self._latent: int = module.kv_lora_rank
        self.fits_pages = fits_pages(self._rotated, self._latent)
        self._value: int = module.v_head_dim
        self._width = max(self._plain + self._rotated, self._value)
        """Of expanded keys and values: kernels want both alike."""
        self._weight: torch.Tensor | None = None
        """A copy, where the layer has no plain weight."""
        if getattr(module.kv_b_proj, "bias", None) is not None:
            raise UnsupportedModelError(f"{self.expansion} has a bias, which no known model has")

    @property
    def is_bound(self) -> bool:
        return vars(self._module).get(OWN) is self

    def bind(self) -> None:
        """Makes the module give us stored rows."""
        setattr(self._module, EXPAND, _unchanged)
        setattr(self._module, OWN, self)

    def release(self) -> None:
        """Restores the module's own way."""
        for name in (EXPAND, OWN):
            vars(self._module).pop(name, None)
        self._weight = None

    def attend(
        self, batch: Batch, layer: int, query: torch.Tensor, rows: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of ``query``, ``[1, heads, total, plain + rotated]``, to stored rows; returns
        ``[1, total, heads, value]``. ``rows``, ``[1, 1, total, dim]``, are the fresh ones, which
        have been written. Hooks see absorbed queries."""
        segments, rules = batch.segments, Rules(scale, rotated=self._rotated)
        # A batch of recorded rows knows no segments: how many keys it has differs.
        expanded = [self.expands(len(segment), segment.end) for segment in segments]
        if not any(expanded):
            absorbed = self._absorb(query, segments)
            batch.show(layer, absorbed, rules)
            return self._attend_absorbed(batch, layer, absorbed, rows, rules)
        if batch.has_hooks:
            batch.show(layer, self._absorb(query, segments), rules)
        queries, fresh = split(query, segments), split(rows, segments)
        outputs: list[torch.Tensor | None] = [None] * len(segments)
        for index, (segment, own) in enumerate(zip(segments, queries, strict=True)):
            if expanded[index]:
                outputs[index] = self._attend_expanded(segment, layer, own, scale)
        others = [index for index in range(len(segments)) if not expanded[index]]
        if others:
            some = batch.part(others)
            asked, written = (
                torch.cat([parts[index] for index in others], 2) for parts in (queries, fresh)
            )
            absorbed = self._absorb(asked, some.segments)
            out = self._attend_absorbed(some, layer, absorbed, written, rules)
            parts = out.split([len(segment) for segment in some.segments], 1)
            for index, part in zip(others, parts, strict=True):
                outputs[index] = part
        return torch.cat(outputs, 1)  # type: ignore[arg-type]  # every segment has one now

    def expands(self, num_rows: int, num_keys: int) -> bool:
        """Whether the expanded form costs less arithmetic for the last ``num_rows`` of
        ``num_keys`` rows."""
        row = self._latent * (self._plain + self._value)
        pairs = num_rows * (num_keys - num_rows / 2)
        saved = pairs * 2 * (self._rotated + self._latent - self._width)
        return saved >= (num_keys - num_rows) * row

    def _attend_absorbed(
        self, batch: Batch, layer: int, absorbed: torch.Tensor, rows: torch.Tensor, rules: Rules
    ) -> torch.Tensor:
        """Attention of queries of stored rows, as :meth:`attend` returns it."""
        out = batch.attend(layer, absorbed, rows, rows, rules)
        latents = out[0, :, :, self._rotated :].transpose(0, 1)
        values = torch.matmul(latents, self._weights()[:, self._plain :].mT)
        for some, delta in self._deltas(batch.segments):
            up = self._by_head(delta)[..., self._plain :]
            values[:, some] += latents[:, some] @ delta.down.mT @ up
        return values.transpose(0, 1)[None]

    def _absorb(self, query: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        """Queries of stored rows, ``[1, heads, total, dim]``."""
        plain, rotated = query.split([self._plain, self._rotated], -1)
        latents = torch.matmul(plain[0], self._weights()[:, : self._plain])
        for some, delta in self._deltas(segments):
            up = self._by_head(delta)[..., : self._plain]
            latents[:, some] += plain[0, :, some] @ up.mT @ delta.down
        return torch.cat([rotated, latents[None]], -1)

    def _attend_expanded(
        self, segment: Segment, layer: int, query: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """The attention of one segment, ``[1, rows, heads, value]``."""
        rows, _ = segment.kv.layer(layer, 0, segment.end)
        if segment.absent is not None:  # pages may hold anything there, even NaN
            absent = segment.absent[: segment.end].to(rows.device)
            rows = rows.masked_fill(absent[:, None], 0)
        more = round_up(segment.end, segment.kv.shape.grid) - segment.end
        rows = pad(rows, (0, 0, 0, more)) if more else rows
        together = max(1, MOST_EXPANDED // (rows.shape[2] * 2 * self._width))
        outputs = []
        for first in range(0, self._heads, together):
            heads = slice(first, first + together)
            keys, values = self._expand(rows, segment, heads)
            asked = _widened(query[:, heads], self._width)
            read = partial(_between, keys, values)
            fresh = read(segment.first, segment.end) if segment.is_plain else (asked, asked)
            out = attend_segment(segment, asked, *fresh, read, Rules(scale))
            outputs.append(out[..., : self._value].transpose(1, 2))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)

    def _expand(
        self, rows: torch.Tensor, segment: Segment, heads: slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of some heads, ``[1, heads, rows, width]``."""
        rotated, latents = rows.split([self._rotated, self._latent], -1)
        weights = self._weights()[heads]
        both = linear(latents[0, 0], weights.flatten(0, 1))
        both = both.view(len(both), len(weights), -1).transpose(0, 1)
        for _, delta in self._deltas([segment]):
            both = both + latents[0] @ delta.down.mT @ self._by_head(delta)[heads]
        plain, values = both[None].split([self._plain, self._value], -1)
        keys = torch.cat([plain, rotated.expand(-1, len(weights), -1, -1)], -1)
        return _widened(keys, self._width), _widened(values, self._width)

    def _weights(self) -> torch.Tensor:
        """The weights that expand a latent to keys and values, ``[heads, plain + value, latent]``.
        The layer has a plain weight, or is asked for the rows of one once."""
        layer = self._module.kv_b_proj
        if type(layer) in _PLAIN and layer.weight.is_floating_point():
            weight = layer.weight
        else:
            if self._weight is None:
                like = next(self._module.kv_a_layernorm.parameters())
                units = torch.eye(self._latent, dtype=like.dtype, device=like.device)
                self._weight = layer.forward(units).t().contiguous()
            weight = self._weight
        return weight.view(self._heads, self._plain + self._value, self._latent)

    def _by_head(self, delta: Delta) -> torch.Tensor:
        """The second factor of an adapter, ``[heads, rank, plain + value]``."""
        return delta.up.view(len(delta.up), self._heads, -1).transpose(0, 1)

    def _deltas(self, segments: Sequence[Segment]) -> Iterator[tuple[slice, Delta]]:
        """The changes of the expansion by adapters, with the rows of the segments that have
        them."""
        end = 0
        for segment in segments:
            first, end = end, end + len(segment)
            applied = segment.kv.adapter
            if applied is not None and self.expansion in applied.adapter.deltas:
                yield slice(first, end), applied.adapter.deltas[self.expansion]


def _unchanged(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The function that a module calls in place of ``expand_kv``."""
    return keys, values


def _between(
    keys: torch.Tensor, values: torch.Tensor, first: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows ``[first, end)`` of keys and values."""
    return keys[:, :, first:end], values[:, :, first:end]


def _widened(rows: torch.Tensor, width: int) -> torch.Tensor:
    """``rows`` with zeros in more channels, if they have fewer than ``width``."""
    more = width - rows.shape[-1]
    return pad(rows, (0, more)) if more else rows
