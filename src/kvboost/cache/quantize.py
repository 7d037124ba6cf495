"""Keys and values as they are kept: as attention produced them, or in 8 or 4 bits.

As in KIVI: keys are quantized per channel over groups of tokens, values per token, both from the
least to the greatest value of their group. Keys are turned back to where position plays no part
first, so that a channel's outliers stay in one channel; a packed chunk is therefore put at any
place by one turn. Kept in full are the first rows of a sequence, on which all later ones dwell,
and the keys behind the last whole group, so that a chunk which goes on later is quantized once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch

BITS = (16, 8, 4)
GROUP = 32
"""Tokens whose keys share a range."""
FIRST_ROWS = 4
"""Rows of a sequence's beginning that are kept in full."""

PLAIN = "kv"

_OVER = {"keys": -2, "values": -1}
_LEAST_STEP = 1e-6  # half precision has no much smaller ones


@dataclass(frozen=True, eq=False)
class KVData:
    """Immutable. With 16 bits one tensor ``kv``, ``[2, layers, kv_heads, tokens, head_dim]``,
    keys first and rotated, in the model's own dtype, so that moving a chunk is one copy. Packed,
    with ``groups`` of keys and ``rest`` keys behind them::

        keys         [layers, kv_heads, groups, GROUP, head_dim], 4 bits: two in a byte
        keys_range   [layers, kv_heads, groups, 2, head_dim], least value and step
        values       [layers, kv_heads, tokens, head_dim], 4 bits: two in a byte
        values_range [layers, kv_heads, tokens, 2]
        first        [2, layers, kv_heads, first, head_dim], in full, instead of what is above
        rest_keys    [layers, kv_heads, rest, head_dim], in full
    """

    bits: int
    tensors: Mapping[str, torch.Tensor]
    key_norm: float = 0.0
    """The mean norm of the keys, if it was measured."""

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def num_tokens(self) -> int:
        if self.bits == 16:
            return self.tensors[PLAIN].shape[3]
        return self.tensors["values"].shape[2]

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> KVData:
        """The same with every tensor changed: moved to another device, say."""
        return replace(self, tensors={name: change(one) for name, one in self.tensors.items()})


class Positions(Protocol):
    """How a model's keys carry their positions."""

    def rotate_to(self, keys: torch.Tensor, position: int, *, back: bool = False) -> torch.Tensor:
        """``keys`` in float32, ``[layers, kv_heads, tokens, dim]``, turned from nowhere to
        ``position`` and those behind it, or ``back``."""

    def move(self, keys: torch.Tensor, distance: int, out: torch.Tensor) -> None:
        """Writes ``keys``, turned by ``distance`` positions more, into ``out``."""


def plain(kv: torch.Tensor) -> KVData:
    assert kv.is_contiguous()
    return KVData(16, {PLAIN: kv})


def usable_rows(bits: int, num_tokens: int, wanted: int) -> int:
    """How many of the first ``wanted`` rows of a chunk may be used alone. A packed one is not cut
    inside a group: its rows would be quantized once more when they are kept again in other
    company."""
    whole = num_tokens // GROUP * GROUP
    return wanted if bits == 16 or wanted >= whole else wanted // GROUP * GROUP


class Quantizer:
    """Packs rows for keeping, and puts kept ones in place. ``positions`` is None for models whose
    keys do not turn. ``own`` says what a copy for keeping is; by default one on the same device.
    With ``measures_keys`` the norm of keys is kept too."""

    def __init__(
        self,
        bits: int,
        positions: Positions | None,
        *,
        own: Callable[[torch.Tensor], torch.Tensor] | None = None,
        measures_keys: bool = False,
    ) -> None:
        self.bits = bits
        self._positions = positions
        self._own = own or _copy
        self._measures_keys = measures_keys

    def pack(
        self, rows: torch.Tensor, position: int, like: KVData | None = None, common: int = 0
    ) -> KVData:
        """``rows``, ``[2, layers, kv_heads, tokens, head_dim]``, the first of which stands at
        ``position``, in memory of their own. The first ``common`` of them are also those of
        ``like``: what it has quantized is taken over."""
        data = self._pack(rows, position, like, common)
        if self._measures_keys:
            data = replace(data, key_norm=float(rows[0].float().norm(dim=-1).mean()))
        return data

    def _pack(self, rows: torch.Tensor, position: int, like: KVData | None, common: int) -> KVData:
        if self.bits == 16:
            return plain(self._own(rows))
        whole = rows.shape[3] // GROUP * GROUP
        known = _take_over(like, common) if like and like.bits == self.bits else {}
        first = rows[:, :, :, : max(0, FIRST_ROWS - position)]
        keys, values = rows
        begin = known["keys"].shape[2] * GROUP if known else 0
        turned = self._turn(keys[:, :, begin:whole].float(), position + begin, back=True)
        if whole and not begin:  # what is kept in full must not widen its group's ranges
            turned[:, :, : first.shape[3]] = turned[:, :, first.shape[3], None]
        groups = turned.view(*turned.shape[:2], -1, GROUP, turned.shape[3])
        begin = known["values"].shape[2] if known else 0
        packed = _quantize(groups, "keys", self.bits)
        packed |= _quantize(values[:, :, begin:].float(), "values", self.bits)
        for name, some in known.items():
            packed[name] = torch.cat([some.to(rows.device), packed[name]], 2)
        if not all(packed[name].isfinite().all() for name in ("keys_range", "values_range")):
            return plain(self._own(rows))
        packed |= {"first": first, "rest_keys": keys[:, :, whole:]}
        return KVData(self.bits, packed).map(self._own)

    def place(self, data: KVData, base: int, offset: int, position: int, out: torch.Tensor) -> None:
        """Writes rows of ``data``, whose chunk stands at ``base``, into ``out``, ``[2, layers,
        kv_heads, rows, head_dim]``: those from ``offset`` on, as they are at ``position`` and
        behind. What is packed is unpacked on the device of ``out``."""
        if data.bits != 16:
            self._unpack(data, base, offset, position, out)
            return
        kv = data.tensors[PLAIN][:, :, :, offset : offset + out.shape[3]]
        distance = position - (base + offset)
        if distance == 0:
            out.copy_(kv, non_blocking=True)
        else:
            out[1].copy_(kv[1], non_blocking=True)
            self._move(kv[0].to(out.device, non_blocking=True), distance, out[0])

    def _unpack(
        self, data: KVData, base: int, offset: int, position: int, out: torch.Tensor
    ) -> None:
        """As :meth:`place`."""
        tensors = {
            name: one.to(out.device, non_blocking=True) for name, one in data.tensors.items()
        }
        keys, values = out
        end = offset + out.shape[3]
        values.copy_(_dequantize(tensors, "values", data.bits)[:, :, offset:end])
        first, rest = tensors["first"], tensors["rest_keys"]
        whole = data.num_tokens - rest.shape[2]
        if offset < whole:
            groups = _dequantize(tensors, "keys", data.bits).flatten(2, 3)[:, :, offset:end]
            keys[:, :, : whole - offset].copy_(self._turn(groups, position))
        distance = position - (base + offset)
        if end > whole:
            start = max(offset, whole)
            self._move(
                rest[:, :, start - whole : end - whole], distance, keys[:, :, start - offset :]
            )
        if offset < first.shape[3]:
            num_rows = min(end, first.shape[3]) - offset
            values[:, :, :num_rows].copy_(first[1, :, :, offset:end])
            self._move(first[0, :, :, offset:end], distance, keys[:, :, :num_rows])

    def _move(self, keys: torch.Tensor, distance: int, out: torch.Tensor) -> None:
        if distance and self._positions is not None:
            self._positions.move(keys, distance, out)
        else:
            out.copy_(keys)

    def _turn(self, keys: torch.Tensor, position: int, *, back: bool = False) -> torch.Tensor:
        """A copy of ``keys``, turned."""
        if self._positions is None:
            return keys.clone()
        return self._positions.rotate_to(keys, position, back=back)


def _copy(rows: torch.Tensor) -> torch.Tensor:
    """``rows`` in contiguous memory that nobody else has."""
    return rows.clone(memory_format=torch.contiguous_format)


def _take_over(like: KVData, common: int) -> dict[str, torch.Tensor]:
    """What is quantized of the first ``common`` rows: whole groups of keys, and values."""
    return {
        name: like.tensors[name][:, :, : common // GROUP if name.startswith("keys") else common]
        for name in ("keys", "keys_range", "values", "values_range")
    }


def _quantize(rows: torch.Tensor, name: str, bits: int) -> dict[str, torch.Tensor]:
    """``rows``, ``[..., n, dim]``, in codes, with least value and step: of every channel for
    keys, of every row for values."""
    over = _OVER[name]
    least = rows.amin(over, keepdim=True).half()
    step = (rows.amax(over, keepdim=True) - least) / (2**bits - 1)
    step = step.clamp(min=_LEAST_STEP).half()
    codes = rows.sub(least).div_(step).round_().clamp_(0, 2**bits - 1).to(torch.uint8)
    if bits == 4:
        low, high = codes.chunk(2, -1)
        codes = high.bitwise_left_shift(4).bitwise_or_(low)
    return {name: codes, f"{name}_range": torch.cat([least, step], over)}


def _dequantize(tensors: Mapping[str, torch.Tensor], name: str, bits: int) -> torch.Tensor:
    """In float32."""
    codes = tensors[name]
    least, step = tensors[f"{name}_range"].float().chunk(2, _OVER[name])
    if bits == 4:
        codes = torch.cat([codes.bitwise_and(15), codes.bitwise_right_shift(4)], -1)
    return codes.float().mul_(step).add_(least)
