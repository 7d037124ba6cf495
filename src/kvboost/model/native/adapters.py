"""The changes of adapters in whole layers, as ``adapters.c`` reads them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_void_p
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
import torch

from kvboost.model.adapters.adapter import Adapter, Delta
from kvboost.model.adapters.layers import AdaptedRows
from kvboost.model.native.kernels import Kernels

LINEARS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)
"""The linear layers of a decoder layer, as ``kernels.h`` numbers them."""
GATED = slice(4, 6)
LANES = 16
"""Of the gated product, so many columns are gates and so many are what they multiply, in turn."""

CHANGE = np.dtype(
    [(name, np.int64) for name in ("down", "up")]
    + [(name, np.int32) for name in ("rank", "width", "column", "interleaved", "first", "num_rows")]
    + [(name, np.int32) for name in ("halved", "unused")]
)
Table = npt.NDArray[np.void]


class ChangeTables:
    """The addresses of adapters' weights for the layers of a model."""

    def __init__(self) -> None:
        self._layers: dict[int, tuple[str, tuple[int, ...]]] = {}
        self._tables: WeakKeyDictionary[Adapter, _AdapterTable] = WeakKeyDictionary()

    def add_layer(self, index: int, name: str, num_queries: int, num_keys: int) -> None:
        """``name`` is the layer's path in the model; its queries and keys have so many columns."""
        columns = (0, num_queries, num_queries + num_keys, 0, 0, LANES, 0)
        self._layers[index] = name, columns

    def of(self, adapter: Adapter) -> Table:
        """``[layers, linear layers]``: what the adapter changes, of no rows yet."""
        if adapter not in self._tables:
            table = np.zeros((max(self._layers) + 1, len(LINEARS)), CHANGE)
            kept: list[torch.Tensor] = []
            for index, (name, columns) in self._layers.items():
                for linear, (path, column) in enumerate(zip(LINEARS, columns, strict=True)):
                    delta = adapter.deltas.get(f"{name}.{path}")
                    if delta is not None:
                        sides = halved(delta) or (delta.down, delta.up)
                        at = [side.data_ptr() for side in sides]
                        is_halved = sides[0] is not delta.down
                        table[index, linear] = (*at, *delta.up.shape, column, 0, 0, 0, is_halved, 0)
                        kept += sides if is_halved else ()
            table["interleaved"][:, GATED] = 1
            self._tables[adapter] = _AdapterTable(table, kept)
        return self._tables[adapter].table


@dataclass(frozen=True)
class _AdapterTable:
    table: Table
    halved: Sequence[torch.Tensor]
    """Weights that only the table refers to."""


def halved(delta: Delta) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Weights of 32 bits in 16 bits, where that loses nothing: most of an adapter's time goes into
    reading them. None if it would."""
    if delta.down.dtype != torch.float32:
        return None
    down, up = delta.down.bfloat16(), delta.up.bfloat16()
    is_same = torch.equal(down.float(), delta.down) and torch.equal(up.float(), delta.up)
    return (down, up) if is_same else None


class _Changes(ctypes.Structure):
    _fields_ = [
        ("changes", c_void_p),
        ("num_runs", c_int32),
        ("most_rank", c_int32),
        ("sums", c_void_p),
        ("wide", c_void_p),
    ]


class Changes:
    """The changes of adapters in the rows of one forward, in all layers."""

    def __init__(self, rows: AdaptedRows, tables: ChangeTables, kernels: Kernels) -> None:
        self.table: Table = np.stack([tables.of(adapter) for _, adapter in rows.runs], axis=2)
        """``[layers, linear layers, runs]``"""
        self.table["first"] = [part.start for part, _ in rows.runs]
        self.table["num_rows"] = [part.stop - part.start for part, _ in rows.runs]
        most_rank = int(self.table["rank"].max())
        num_wide = 2 * int(self.table["width"][:, GATED].max())
        sums = kernels.scratch("sums", 3 * rows.num_rows * most_rank, torch.float32)
        wide = kernels.scratch("wide", rows.num_rows * num_wide)
        # Another forward may run between two layers of this one and replace them by larger ones.
        self._held = sums, wide
        self._struct = _Changes(
            self.table.ctypes.data, len(rows.runs), most_rank, sums.data_ptr(), wide.data_ptr()
        )
        self.address = ctypes.addressof(self._struct)


def changes_of(rows: AdaptedRows | None, tables: ChangeTables, kernels: Kernels) -> Changes | None:
    """The changes of a forward, made in its first layer."""
    if rows is None:
        return None
    made = rows.changes
    if not isinstance(made, Changes):
        made = rows.changes = Changes(rows, tables, kernels)
    return made
