"""Far rows in 8 or 4 bits, in the memory of the host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import accumulate
from math import prod
from typing import Protocol

import torch

from kvboost.errors import KVBoostError
from kvboost.model.execution.host_memory import host_memory
from kvboost.model.execution.kv import Prefix
from kvboost.model.execution.kv_shape import KVShape
from kvboost.model.far.rows import FarAttention, FarRows

BLOCK = 1024
"""Rows whose codes are next to each other in memory."""


class RowCodec(Protocol):
    """Rows in fewer bits. Keys are encoded in groups of ``group`` rows."""

    bits: int
    group: int

    def encode(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        """``rows``, ``[2, ..., rows, dim]``, as ``keys``, ``[..., groups, group, codes]``,
        ``keys_range``, ``[..., groups, 2, dim]``, ``values``, ``[..., rows, codes]`` and
        ``values_range``, ``[..., rows, 2]``: codes in bytes, ranges in float16."""

    def decode(self, codes: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The rows again, in float32."""


class CodeLayout:
    """Where codes are in the bytes of a block."""

    def __init__(self, shape: KVShape, codec: RowCodec) -> None:
        heads, dim, groups = shape.num_kv_heads, shape.head_dim, BLOCK // codec.group
        codes = dim * codec.bits // 8
        self._sizes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
            "keys": (torch.uint8, (heads, groups, codec.group, codes)),
            "values": (torch.uint8, (heads, BLOCK, codes)),
            "keys_range": (torch.float16, (heads, groups, 2, dim)),
            "values_range": (torch.float16, (heads, BLOCK, 2)),
        }
        sizes = [prod(size) * dtype.itemsize for dtype, size in self._sizes.values()]
        self._ends = list(accumulate(sizes))
        self.block_bytes = self._ends[-1]

    def views(self, blocks: torch.Tensor) -> dict[str, torch.Tensor]:
        """The parts of ``blocks``, ``[..., block_bytes]``: of each ``[..., kv_heads, ...]``."""
        starts = [0, *self._ends[:-1]]
        return {
            name: blocks[..., start:end].view(dtype).unflatten(-1, size)
            for (name, (dtype, size)), start, end in zip(
                self._sizes.items(), starts, self._ends, strict=True
            )
        }


class CodedMemory:
    """Space for ``num_rows`` rows. The first group is kept in full, on the device: all later rows
    attend to the first ones."""

    def __init__(self, shape: KVShape, num_rows: int, codec: RowCodec) -> None:
        self.shape, self.codec = shape, codec
        self.layout = CodeLayout(shape, codec)
        self.num_rows = num_rows
        self.num_bytes = coded_bytes(shape, codec, num_rows)
        size = (2, shape.num_layers, shape.num_kv_heads, codec.group, shape.head_dim)
        self._first = torch.zeros(size, dtype=shape.dtype, device=shape.device)
        memory = host_memory(self.num_bytes)
        self.codes = memory.view(shape.num_layers, -1, self.layout.block_bytes)
        self._views = self.layout.views(self.codes)
        self.on_close: Callable[[], object] = _nothing

    def write(self, start: int, rows: torch.Tensor) -> None:
        """Encodes ``rows``, ``[2, layers, kv_heads, rows, head_dim]``, whole groups."""
        group = self.codec.group
        count = rows.shape[3]
        assert start % group == 0 and count % group == 0
        if start == 0 and count:
            self._first.copy_(rows[:, :, :, :group])
        end = start + count
        for block in range(start // BLOCK, -(-end // BLOCK)):
            first, last = max(start, block * BLOCK), min(end, (block + 1) * BLOCK)
            self._write_block(block, first % BLOCK, rows[:, :, :, first - start : last - start])

    def _write_block(self, block: int, start: int, rows: torch.Tensor) -> None:
        coded = {name: part.cpu() for name, part in self.codec.encode(rows).items()}
        if not all(coded[name].isfinite().all() for name in ("keys_range", "values_range")):
            raise KVBoostError(
                f"KV of this request is too large for {self.codec.bits} bits; set far_kv_bits=16"
            )
        for name, part in coded.items():
            first = start // self.codec.group if name.startswith("keys") else start
            self._views[name][:, block, :, first : first + part.shape[2]] = part

    def source(self, layer: int, start: int, end: int) -> torch.Tensor:
        """The blocks with rows ``[start, end)``, ``[blocks, block_bytes]``."""
        return self.codes[layer, start // BLOCK : -(-end // BLOCK)]

    def decode(self, blocks: torch.Tensor, layer: int, start: int, end: int) -> torch.Tensor:
        """Rows ``[start, end)`` of blocks that begin at the one of ``start``, ``[2, kv_heads, rows,
        head_dim]`` on the device of the blocks."""
        skipped = start % BLOCK
        decoded = self.codec.decode(self.layout.views(blocks))  # [2, blocks, heads, BLOCK, dim]
        rows = decoded.transpose(1, 2).flatten(2, 3).to(self.shape.dtype)
        rows = rows[:, :, skipped : skipped + end - start]
        full = min(end, self.codec.group) - start
        if full > 0:
            rows[:, :, :full] = self._first[:, layer, :, start : start + full].to(rows.device)
        return rows

    def read(self, layer: int, start: int, end: int) -> torch.Tensor:
        """As :meth:`decode`, on the model's device."""
        blocks = self.source(layer, start, end).to(self.shape.device)
        return self.decode(blocks, layer, start, end)

    def close(self) -> None:
        self.shape.traits.wait(self.shape.device)
        self.on_close()


class CodedRows(FarRows):
    """The first ``count`` rows of ``memory``."""

    def __init__(self, memory: CodedMemory, count: int, attention: FarAttention) -> None:
        Prefix.__init__(self, count)
        self._memory, self._attention = memory, attention
        self.data = memory.codes

    def first(self, count: int) -> FarRows:
        return self if count >= self.count else CodedRows(self._memory, count, self._attention)

    def source(self, layer: int, start: int, end: int) -> torch.Tensor:
        return self._memory.source(layer, start, end)

    def unpack(
        self, copied: torch.Tensor, layer: int, start: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        end = min(self.count, (start // BLOCK + len(copied)) * BLOCK)
        rows = self._memory.decode(copied, layer, start, end)
        return rows[:1], rows[1:]

    @property
    def layer_bytes(self) -> int:
        return self.source(0, 0, self.count).nbytes


def coded_bytes(shape: KVShape, codec: RowCodec, num_rows: int) -> int:
    """The bytes that so many rows take."""
    blocks = -(-num_rows // BLOCK)
    return shape.num_layers * blocks * CodeLayout(shape, codec).block_bytes


def _nothing() -> None: ...
