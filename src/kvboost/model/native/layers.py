"""Layers of a model on our kernels: products with weights rearranged once, gated ones, norms."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_void_p

import torch

from kvboost.model import native

BLOCK = 32
"""Rows and columns of weights come in multiples of this."""
HALF = BLOCK // 2
LANES = 16
"""The dimension of a norm is a multiple of this in bfloat16."""


class LinearStruct(ctypes.Structure):
    """``Linear`` in kernels.h."""

    _fields_ = [
        ("weights", c_void_p),
        ("bias", c_void_p),
        *((name, c_int32) for name in ("n", "k", "gated", "halved")),
        ("panels", c_void_p),
        ("fine", c_int32),
    ]


class Linear:
    """Rows times weights that the kernels describe by ``address``."""

    dtype: torch.dtype
    """That of the rows in calls of whole layers."""
    width: int
    depth: int
    packed_depth: int
    """Space that the kernels need for each row, in numbers."""
    address: int
    _library: ctypes.CDLL

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The output has the dtype of the rows."""
        given = rows.to(self.dtype).contiguous()
        number = given.numel() // self.depth
        out = given.new_empty((*given.shape[:-1], self.width))
        packed = scratch(rounded_up(number) * self.packed_depth, self.dtype)
        self._library.kvboost_linear(
            *(self.address, given.data_ptr(), number, None, out.data_ptr(), packed.data_ptr()),
            torch.get_num_threads(),
        )
        return out.to(rows.dtype)


class Product(Linear):
    """Rows times ``weight``, ``[n, k]``. It holds a rearranged copy of the weight; of a float32
    weight whose numbers are all bfloat16 numbers, a copy of half the size."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False
    ) -> None:
        self.dtype = weight.dtype
        self._library = native.library(weight.dtype)
        weight = weight.contiguous()
        n, k = weight.shape
        self.is_halved = can_halve(weight)
        kept = torch.bfloat16 if self.is_halved else weight.dtype
        self._packed, address = aligned(weight.numel(), kept)
        pack = self._library.kvboost_pack
        if self.is_halved:
            pack = self._library.kvboost_pack_halved
        pack(weight.data_ptr(), n, k, address)
        self._bias = None if bias is None else bias.contiguous()
        self.width, self.depth = n // 2 if gated else n, k
        self.packed_depth = k
        bias_address = None if self._bias is None else self._bias.data_ptr()
        self._linear = LinearStruct(address, bias_address, n, k, gated, self.is_halved, None)
        self.address = ctypes.addressof(self._linear)

    @classmethod
    def gated(
        cls, gate: torch.Tensor, up: torch.Tensor, biases: tuple[torch.Tensor, ...] = ()
    ) -> Product:
        """``silu(rows gate') * (rows up')`` in one call."""
        bias = _interleave(*biases) if biases else None
        return cls(_interleave(gate, up), bias, gated=True)


def can_multiply(weight: torch.Tensor) -> bool:
    """Whether there is a kernel for this weight, ``[n, k]``, on this machine."""
    n, k = weight.shape
    return n % BLOCK == k % BLOCK == 0 and native.is_available(weight.dtype, weight.device)


def can_halve(weight: torch.Tensor) -> bool:
    """Whether a float32 weight loses nothing in bfloat16. Most models are published in it."""
    return weight.dtype == torch.float32 and torch.equal(weight.bfloat16().float(), weight)


def can_norm(weight: torch.Tensor) -> bool:
    """Whether there is a kernel for a norm with this weight on this machine."""
    return len(weight) % LANES == 0 and native.is_available(weight.dtype, weight.device)


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight * rows / rms(rows)``; the last dimension is a multiple of 16."""
    rows = rows.contiguous()
    out = torch.empty_like(rows)
    dim = rows.shape[-1]
    native.library(weight.dtype).kvboost_norm(
        rows.data_ptr(),
        rows.numel() // dim,
        dim,
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def _interleave(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Sixteen rows of one, sixteen of the other, and so on."""
    rest = gate.shape[1:]
    both = torch.stack([part.reshape(-1, HALF, *rest) for part in (gate, up)], dim=1)
    return both.reshape(-1, *rest)


def scratch(num: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory for ``num`` numbers, whatever torch's defaults are; aligned to 64 bytes."""
    return torch.empty(num, dtype=dtype, device="cpu")


def rounded_up(rows: int) -> int:
    return -(-rows // BLOCK) * BLOCK


def aligned(num: int, dtype: torch.dtype) -> tuple[torch.Tensor, int]:
    """Memory for ``num`` numbers: the tensor that holds it, and an address in it that is a
    multiple of 64."""
    memory = scratch(num + 64 // dtype.itemsize, dtype)
    return memory, -(-memory.data_ptr() // 64) * 64
