"""Rotary positions: how keys are turned to another place.

RoPE turns each pair of a key's channels by ``position * frequency``. Two turns add up, so a key
that was computed at one position is moved to another by turning it once more, by the difference.
What a scaled RoPE (linear, NTK by parts, YaRN, llama3) changes are the frequencies; YaRN's
attention factor is a length, which turning leaves alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

Turns = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of angles."""
MoveKeys = Callable[[torch.Tensor, Turns, torch.Tensor], bool]
"""Turns keys into ``out`` as :meth:`Rotation.move` does, or says that it cannot."""


class Rotation:
    """``frequencies`` is ``[layers, pairs]``, radians per position; a layer without positions has
    zeros. Channels beyond ``2 * pairs`` are not turned. Pairs are channels ``(i, i + pairs)``, or
    neighbours ``(2i, 2i + 1)`` where the layout is ``interleaved``. ``kernel`` is asked first to
    move keys whose pairs are halves."""

    def __init__(
        self,
        frequencies: torch.Tensor,
        *,
        interleaved: bool = False,
        kernel: MoveKeys | None = None,
    ) -> None:
        self._frequencies = frequencies.detach().to("cpu", torch.float64)
        self._interleaved = interleaved
        self._kernel = None if interleaved else kernel
        self._turns = lru_cache(maxsize=64)(self._make_turns)
        self._tables: dict[torch.device, Turns] = {}
        _, kinds = torch.unique(self._frequencies, dim=0, return_inverse=True)
        self.kinds: list[int] = kinds.tolist()
        """Per layer; layers of one kind turn alike. Most models have one, Gemma 3 has two."""

    def move(self, keys: torch.Tensor, distance: int, out: torch.Tensor) -> None:
        """Writes ``keys``, ``[layers, kv_heads, tokens, dim]``, moved by ``distance`` positions
        into ``out``. Computed in float32, rounded once."""
        turns = self._turns(distance, keys.device)
        if self._kernel is not None and self._kernel(keys, turns, out):
            return
        cos, sin = (part[:, None, None, :] for part in turns)
        turned = self._turn(keys.float(), cos, sin)
        out.copy_(turned, non_blocking=True)

    def turn_to(self, keys: torch.Tensor, position: int, *, back: bool = False) -> torch.Tensor:
        """``keys`` in float32, ``[layers, kv_heads, tokens, dim]``, turned from where position
        plays no part to ``position`` and those behind it, or ``back``."""
        end = position + keys.shape[2]
        cos, sin = (part[:, None, position:end] for part in self._table(end, keys.device))
        return self._turn(keys, cos, -sin if back else sin)

    def turns(self, layer: int, positions: torch.Tensor) -> Turns:
        """Cosine and sine ``[positions, pairs]`` of every position's turn in one layer."""
        angles = positions.cpu().double()[:, None] * self._frequencies[layer]
        return _cos_sin(angles, positions.device)

    def turn(self, keys: torch.Tensor, turns: Turns, *, back: bool = False) -> torch.Tensor:
        """``keys`` in float32, ``[..., positions, dim]``, turned to their positions, or ``back``
        to where position plays no part."""
        cos, sin = turns
        return self._turn(keys, cos, -sin if back else sin)

    def spread(self, turns: Turns, dim: int) -> Turns:
        """``turns`` over all ``dim`` channels, so that ``keys * cos + quarter(keys) * sin`` turns
        them; channels that do not turn are multiplied by one."""
        cos, sin = turns
        wide = cos.new_ones(*cos.shape[:-1], dim), sin.new_zeros(*sin.shape[:-1], dim)
        for part, channels in zip((cos, sin), wide, strict=True):
            for half in self._pairs(channels):
                half.copy_(part)
        return wide

    def quarter(self, keys: torch.Tensor) -> torch.Tensor:
        """``keys`` with every pair turned by a quarter; channels that do not turn become zero."""
        first, second = self._pairs(keys)
        turned = torch.zeros_like(keys)
        to_first, to_second = self._pairs(turned)
        to_first.copy_(-second)
        to_second.copy_(first)
        return turned

    def _make_turns(self, distance: int, device: torch.device) -> Turns:
        return _cos_sin(distance * self._frequencies, device)

    def _table(self, num_positions: int, device: torch.device) -> Turns:
        """Turns ``[layers, positions, pairs]`` of at least ``num_positions``; one for all layers
        where they turn alike."""
        table = self._tables.get(device)
        if table is None or table[0].shape[1] < num_positions:
            positions = torch.arange(max(1024, 2 * num_positions), dtype=torch.float64)
            layers = self._frequencies if len(set(self.kinds)) > 1 else self._frequencies[:1]
            table = _cos_sin(positions[:, None] * layers[:, None, :], device)
            self._tables[device] = table
        return table

    def _turn(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = self._pairs(keys)
        turned = keys.clone()
        to_first, to_second = self._pairs(turned)
        torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=to_second).addcmul_(first, sin)
        return turned

    def _pairs(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of both halves of every pair."""
        num_pairs = self._frequencies.shape[1]
        if self._interleaved:
            turning = keys[..., : 2 * num_pairs]
            return turning[..., 0::2], turning[..., 1::2]
        return keys[..., :num_pairs], keys[..., num_pairs : 2 * num_pairs]


def _cos_sin(angles: torch.Tensor, device: torch.device) -> Turns:
    """In float64 first: thousands of radians leave float32 few digits."""
    return angles.cos().float().to(device), angles.sin().float().to(device)
