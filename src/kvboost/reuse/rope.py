"""Rotary positions: how keys are rotated to another position.

RoPE rotates each pair of a key's channels by ``position * frequency``. Rotations add up, so a key
that was computed at one position is moved to another by rotating it once more, by the difference.
A scaled RoPE (linear, NTK by parts, YaRN, llama3) changes the frequencies. YaRN's attention factor
scales lengths, which a rotation does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

CosSin = tuple[torch.Tensor, torch.Tensor]
"""Cosine and sine of angles."""
MoveKeys = Callable[[torch.Tensor, CosSin, torch.Tensor], bool]
"""Rotates keys into ``out`` as :meth:`Rotation.move` does; returns False if it cannot."""


class Rotation:
    """``frequencies`` is ``[layers, pairs]``, radians per position; a layer without positions has
    zeros. Channels beyond ``2 * pairs`` are not rotated. Pairs are channels ``(i, i + pairs)``, or
    neighbours ``(2i, 2i + 1)`` if the layout is ``interleaved``. ``kernel`` is tried first to move
    keys whose pairs are halves."""

    def __init__(
        self,
        frequencies: torch.Tensor,
        *,
        interleaved: bool = False,
        kernel: MoveKeys | None = None,
    ) -> None:
        self.frequencies = frequencies.detach().to("cpu", torch.float64)
        self.interleaved = interleaved
        self._kernel = None if interleaved else kernel
        self._distance_cos_sin = lru_cache(maxsize=64)(self._make_cos_sin)
        self._tables: dict[torch.device, CosSin] = {}
        _, kinds = torch.unique(self.frequencies, dim=0, return_inverse=True)
        self.kinds: list[int] = kinds.tolist()
        """One number per layer; layers of one kind rotate alike. Most models have one kind, Gemma 3
        has two."""
        self._different = self.frequencies if len(set(self.kinds)) > 1 else self.frequencies[:1]
        """One entry for all layers if they rotate alike."""

    @property
    def groups(self) -> tuple[Rotation, ...]:
        """As those of :class:`MixedRotation`: there is one."""
        return (self,)

    def at(self, layer: int) -> tuple[Rotation, int]:
        """The rotation of the layers like ``layer``, and its number among them."""
        return self, layer

    def move(self, keys: torch.Tensor, distance: int, out: torch.Tensor) -> None:
        """Writes ``keys``, ``[layers, kv_heads, tokens, dim]``, moved by ``distance`` positions
        into ``out``. Computed in float32, rounded once."""
        cos_sin = self._distance_cos_sin(distance, keys.device)
        if self._kernel is not None and self._kernel(keys, cos_sin, out):
            return
        cos, sin = (part[:, None, None, :] for part in cos_sin)
        rotated = self._rotate(keys.float(), cos, sin)
        out.copy_(rotated, non_blocking=True)

    def rotate_to(self, keys: torch.Tensor, position: int, *, back: bool = False) -> torch.Tensor:
        """``keys`` in float32, ``[layers, kv_heads, tokens, dim]``, rotated from position 0
        to ``position`` and the positions after it, or ``back`` from there."""
        end = position + keys.shape[2]
        cos, sin = (part[:, None, position:end] for part in self._table(end, keys.device))
        return self._rotate(keys, cos, -sin if back else sin)

    def cos_sin(self, layer: int, positions: torch.Tensor) -> CosSin:
        """Cosine and sine ``[positions, pairs]`` of each position's rotation in one layer."""
        angles = positions.cpu().double()[:, None] * self.frequencies[layer]
        return _cos_sin(angles, positions.device)

    def turns(self, distances: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Cosine and sine ``[2, layers, distances, pairs]`` of rotations by ``distances``, on the
        host; one entry for all layers if they rotate alike."""
        angles = np.array(distances)[:, None] * self._different[:, None].numpy()
        return np.stack([np.cos(angles), np.sin(angles)]).astype(np.float32)

    def spread(self, cos_sin: CosSin, dim: int) -> CosSin:
        """``cos_sin`` over all ``dim`` channels, so that ``keys * cos + quarter_turn(keys) * sin``
        rotates them; channels that do not rotate are multiplied by one."""
        cos, sin = cos_sin
        wide = cos.new_ones(*cos.shape[:-1], dim), sin.new_zeros(*sin.shape[:-1], dim)
        for part, channels in zip((cos, sin), wide, strict=True):
            for half in self._pairs(channels):
                half.copy_(part)
        return wide

    def quarter_turn(self, keys: torch.Tensor) -> torch.Tensor:
        """``keys`` with every pair rotated by 90 degrees; other channels become zero."""
        first, second = self._pairs(keys)
        rotated = torch.zeros_like(keys)
        to_first, to_second = self._pairs(rotated)
        to_first.copy_(-second)
        to_second.copy_(first)
        return rotated

    def _make_cos_sin(self, distance: int, device: torch.device) -> CosSin:
        return _cos_sin(distance * self.frequencies, device)

    def _table(self, num_positions: int, device: torch.device) -> CosSin:
        """Cosine and sine ``[layers, positions, pairs]`` of at least ``num_positions``; one entry
        for all layers if they rotate alike."""
        table = self._tables.get(device)
        if table is None or table[0].shape[1] < num_positions:
            positions = torch.arange(max(1024, 2 * num_positions), dtype=torch.float64)
            table = _cos_sin(positions[:, None] * self._different[:, None, :], device)
            self._tables[device] = table
        return table

    def _rotate(self, keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        first, second = self._pairs(keys)
        rotated = keys.clone()
        to_first, to_second = self._pairs(rotated)
        torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=to_second).addcmul_(first, sin)
        return rotated

    def _pairs(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Views of both halves of every pair."""
        num_pairs = self.frequencies.shape[1]
        if self.interleaved:
            rotating = keys[..., : 2 * num_pairs]
            return rotating[..., 0::2], rotating[..., 1::2]
        return keys[..., :num_pairs], keys[..., num_pairs : 2 * num_pairs]


class MixedRotation:
    """Of a model whose layers differ: the rotation of each group of layers that are alike.
    ``places`` gives for each layer its group, and its number in that group."""

    def __init__(self, groups: Sequence[Rotation], places: Sequence[tuple[int, int]]) -> None:
        self.groups = tuple(groups)
        self._places = places
        kinds = [(group, self.groups[group].kinds[number]) for group, number in places]
        numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
        self.kinds = [numbers[kind] for kind in kinds]
        """As :attr:`Rotation.kinds`."""

    def at(self, layer: int) -> tuple[Rotation, int]:
        """As :meth:`Rotation.at`."""
        group, number = self._places[layer]
        return self.groups[group], number


AnyRotation = Rotation | MixedRotation


def _cos_sin(angles: torch.Tensor, device: torch.device) -> CosSin:
    """In float64 first: thousands of radians leave float32 few digits."""
    return angles.cos().float().to(device), angles.sin().float().to(device)
