"""Stored keys and values: as attention produced them, or in 8 or 4 bits.

As in KIVI: keys are quantized per channel over groups of tokens, values per token, both from the
least to the greatest value of their group. Keys are first rotated back to position zero, so that a
channel's outliers stay in one channel; a quantized chunk can then be placed at any position with
one rotation. Two kinds of rows stay in full precision: the first rows of a sequence, to which all
later ones attend, and the keys after the last whole group, so that a chunk that grows later is
quantized only once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

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
    keys first and rotated, in the model's own dtype, so that moving a chunk is one copy; where a
    row is both key and value, ``[1, ...]``. Quantized, with ``groups`` of keys and ``rest`` keys
    after them::

        keys         [layers, kv_heads, groups, GROUP, head_dim], 4 bits: two in a byte
        keys_range   [layers, kv_heads, groups, 2, head_dim], least value and step
        values       [layers, kv_heads, tokens, head_dim], 4 bits: two in a byte
        values_range [layers, kv_heads, tokens, 2]
        first        [2, layers, kv_heads, first, head_dim], in full, instead of what is above
        rest_keys    [layers, kv_heads, rest, head_dim], in full
    """

    bits: int
    tensors: Mapping[str, torch.Tensor]
    in_pages: ClassVar[bool] = False
    """Whether the rows are in pages of running requests; ``tensors`` is then a copy."""

    @property
    def number(self) -> int | None:
        """The number by which other ranks know it; None if there are no others."""
        return None

    @staticmethod
    def gather(several: Sequence[KVData]) -> list[KVData]:
        """The same outside of such pages."""
        return list(several)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def num_tokens(self) -> int:
        full = self.tensors.get(PLAIN)
        return self.tensors["values"].shape[2] if full is None else full.shape[3]

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> KVData:
        """The same with every tensor changed, for example moved to another device."""
        tensors = {name: change(one) for name, one in self.tensors.items()}
        return KVData(self.bits, tensors)

    def heads(self, start: int, end: int) -> KVData:
        """The KV heads ``[start, end)`` alone, as views."""
        tensors = {
            name: one.narrow(_head_axis(name), start, end - start)
            for name, one in self.tensors.items()
        }
        return KVData(self.bits, tensors)


@dataclass(frozen=True, slots=True)
class NewRows:
    """Rows ``[start, end)`` of a request, to be stored as one chunk. The first ``common`` of them
    are also those of ``like``, which is stored already."""

    start: int
    end: int
    like: KVData | None = None
    common: int = 0


@dataclass(frozen=True)
class KVFormat:
    """The format in which an engine's chunks are stored: the shape of its model's KV, and in how
    many bits. What was read from elsewhere is compared with it before it is used."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    bits: int = 16
    """Besides 16, which is used where KV cannot be quantized."""
    sides: int = 2
    """2: keys and values. 1: rows that serve as both, which are not quantized."""

    @classmethod
    def of(cls, bits: int, tensors: Mapping[str, torch.Tensor]) -> KVFormat | None:
        """The format that these tensors seem to have, for when no model is at hand."""
        full = tensors.get(PLAIN if bits == 16 else "first")
        if full is None or full.dim() != 5 or not full.is_floating_point():
            return None
        sides, layers, heads, _, dim = full.shape
        return cls(layers, heads, dim, full.dtype, bits, sides)

    def describes(
        self, bits: int, num_tokens: int, position: int, tensors: Mapping[str, torch.Tensor]
    ) -> bool:
        """Whether ``tensors`` are a chunk of ``num_tokens`` from ``position`` on in this format:
        their names, dtypes and shapes, nothing missing and nothing more."""
        if bits not in (16, self.bits) or self.head_dim < 1 or self.num_layers < 1:
            return False
        expected = self._tensors(bits, num_tokens, position)
        found = {name: (one.dtype, tuple(one.shape)) for name, one in tensors.items()}
        return found == expected

    def most_bytes(self, num_tokens: int, position: int) -> int:
        """The bytes of a chunk of ``num_tokens`` from ``position`` on, in the larger precision."""

        def size(bits: int) -> int:
            tensors = self._tensors(bits, num_tokens, position).values()
            return sum(dtype.itemsize * math.prod(shape) for dtype, shape in tensors)

        return max(size(16), size(self.bits))

    def _tensors(
        self, bits: int, num_tokens: int, position: int
    ) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """As :class:`KVData` draws them."""
        heads, dim = (self.num_layers, self.num_kv_heads), self.head_dim
        if bits == 16:
            return {PLAIN: (self.dtype, (self.sides, *heads, num_tokens, dim))}
        groups, rest = divmod(num_tokens, GROUP)
        first = min(num_tokens, max(0, FIRST_ROWS - position))
        codes = dim if bits == 8 else dim // 2
        return {
            "keys": (torch.uint8, (*heads, groups, GROUP, codes)),
            "keys_range": (torch.float16, (*heads, groups, 2, dim)),
            "values": (torch.uint8, (*heads, num_tokens, codes)),
            "values_range": (torch.float16, (*heads, num_tokens, 2)),
            "first": (self.dtype, (2, *heads, first, dim)),
            "rest_keys": (self.dtype, (*heads, rest, dim)),
        }


class Positions(Protocol):
    """The rotation of a model's keys by their positions."""

    def rotate_to(self, keys: torch.Tensor, position: int, *, back: bool = False) -> torch.Tensor:
        """``keys`` in float32, ``[layers, kv_heads, tokens, dim]``, rotated from position zero to
        ``position`` and those after it, or ``back``."""

    def move(self, keys: torch.Tensor, distance: int, out: torch.Tensor) -> None:
        """Writes ``keys``, rotated by another ``distance`` positions, into ``out``."""


def plain(kv: torch.Tensor) -> KVData:
    assert kv.is_contiguous()
    return KVData(16, {PLAIN: kv})


def join_heads(parts: Sequence[KVData]) -> KVData:
    """Joins what ``KVData.heads`` took apart. All parts must have the same precision."""
    first = parts[0]
    tensors = {
        name: torch.cat([part.tensors[name] for part in parts], _head_axis(name))
        for name in first.tensors
    }
    return KVData(first.bits, tensors)


def _head_axis(name: str) -> int:
    return 2 if name in (PLAIN, "first") else 1


def usable_rows(bits: int, num_tokens: int, wanted: int) -> int:
    """The number of the first ``wanted`` rows of a chunk that may be used alone. A quantized chunk
    is not cut inside a group: its rows would be quantized again when they are stored in another
    group."""
    whole = num_tokens // GROUP * GROUP
    return wanted if bits == 16 or wanted >= whole else wanted // GROUP * GROUP


class Quantizer:
    """Packs rows for storing, and writes stored rows into place. ``positions`` is None for models
    whose keys do not rotate. ``own`` makes the copy to be stored; by default one on the same
    device."""

    def __init__(
        self,
        bits: int,
        positions: Positions | None,
        *,
        own: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> None:
        self.bits = bits
        self._positions = positions
        self._copies_together = bits == 16 and own is None
        self._own = own or _copy

    def pack_all(self, rows: torch.Tensor, parts: Sequence[NewRows]) -> list[KVData]:
        """``rows`` as the chunks of ``parts``, which follow one another and are all of them. As
        :meth:`pack`, in one call where that is possible."""
        sizes = [part.end - part.start for part in parts]
        if self._copies_together:
            # Each copy has memory of its own: chunks are evicted one by one.
            copies = torch.split_with_sizes_copy(rows, sizes, 3)  # type: ignore[func-returns-value]
            return [plain(copy) for copy in copies]  # type: ignore[attr-defined]
        return [
            self.pack(some, part.start, part.like, part.common)
            for part, some in zip(parts, torch.split_with_sizes(rows, sizes, 3), strict=True)
        ]

    def pack(
        self, rows: torch.Tensor, position: int, like: KVData | None = None, common: int = 0
    ) -> KVData:
        """``rows``, ``[2, layers, kv_heads, tokens, head_dim]``, which begin at ``position``, in
        memory of their own. The first ``common`` of them are also those of ``like``: what is
        quantized there is copied."""
        if self.bits == 16:
            return plain(self._own(rows))
        whole = rows.shape[3] // GROUP * GROUP
        known = _take_over(like, common) if like and like.bits == self.bits else {}
        first = rows[:, :, :, : max(0, FIRST_ROWS - position)]
        keys, values = rows
        begin = known["keys"].shape[2] * GROUP if known else 0
        bare = self._rotate(keys[:, :, begin:whole].float(), position + begin, back=True)
        if whole and not begin:  # rows stored in full must not widen the ranges of their group
            bare[:, :, : first.shape[3]] = bare[:, :, first.shape[3], None]
        groups = bare.view(*bare.shape[:2], -1, GROUP, bare.shape[3])
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
        """Writes rows of ``data``, a chunk from position ``base`` on, into ``out``, ``[2, layers,
        kv_heads, rows, head_dim]``: the rows from ``offset`` on, rotated to ``position`` and after.
        Quantized rows are restored on the device of ``out``."""
        if data.bits != 16:
            self._unpack(data, base, offset, position, out)
            return
        kv = data.tensors[PLAIN][:, :, :, offset : offset + out.shape[3]]
        distance = position - (base + offset)
        if distance == 0:
            out.copy_(kv, non_blocking=True)
        else:
            out[1:].copy_(kv[1:], non_blocking=True)
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
            keys[:, :, : whole - offset].copy_(self._rotate(groups, position))
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

    def _rotate(self, keys: torch.Tensor, position: int, *, back: bool = False) -> torch.Tensor:
        """A rotated copy of ``keys``."""
        if self._positions is None:
            return keys.clone()
        return self._positions.rotate_to(keys, position, back=back)


class RowCodec:
    """Rows in ``bits`` where they are: keys stay rotated. Whole groups only."""

    group = GROUP

    def __init__(self, bits: int) -> None:
        self.bits = bits

    def encode(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """``rows``, ``[2, ..., rows, dim]``, as the quantized tensors of :class:`KVData`."""
        keys, values = rows.float()
        groups = keys.unflatten(-2, (-1, GROUP))
        return _quantize(groups, "keys", self.bits) | _quantize(values, "values", self.bits)

    def decode(self, codes: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The rows again, in float32."""
        keys = _dequantize(codes, "keys", self.bits).flatten(-3, -2)
        return torch.stack([keys, _dequantize(codes, "values", self.bits)])


def _copy(rows: torch.Tensor) -> torch.Tensor:
    """``rows`` in contiguous memory of their own."""
    return rows.clone(memory_format=torch.contiguous_format)


def _take_over(like: KVData, common: int) -> dict[str, torch.Tensor]:
    """The quantized part of the first ``common`` rows: whole groups of keys, and values."""
    return {
        name: like.tensors[name][:, :, : common // GROUP if name.startswith("keys") else common]
        for name in ("keys", "keys_range", "values", "values_range")
    }


def _quantize(rows: torch.Tensor, name: str, bits: int) -> dict[str, torch.Tensor]:
    """``rows``, ``[..., n, dim]``, as codes with their least value and step: per channel for keys,
    per row for values."""
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
