"""Layers of a model on our kernels: products with weights rearranged once, gated ones, norms."""

from __future__ import annotations

import ctypes
from ctypes import c_int32, c_void_p

import torch

from kvboost.model.native.build import load_library

BLOCK = 32
"""Rows and columns of weights come in so many."""
HALF = BLOCK // 2


class _Linear(ctypes.Structure):
    _fields_ = [
        ("weights", c_void_p),
        ("bias", c_void_p),
        ("n", c_int32),
        ("k", c_int32),
        ("gated", c_int32),
    ]


class Product:
    """Rows times ``weight``, ``[n, k]``. The rearranged copy is all it needs."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, gated: bool = False
    ) -> None:
        self._library = _library()
        weight = weight.contiguous()
        n, k = weight.shape
        self._packed, address = _aligned(weight.numel())
        self._library.kvboost_pack(weight.data_ptr(), n, k, address)
        self._bias = None if bias is None else bias.contiguous()
        self.width, self.depth = n // 2 if gated else n, k
        bias_address = None if self._bias is None else self._bias.data_ptr()
        self._linear = _Linear(address, bias_address, n, k, gated)
        self.address = ctypes.addressof(self._linear)

    @classmethod
    def gated(
        cls, gate: torch.Tensor, up: torch.Tensor, biases: tuple[torch.Tensor, ...] = ()
    ) -> Product:
        """``silu(rows gate') * (rows up')``: what a gate lets through, in one go."""
        bias = _woven(*biases) if biases else None
        return cls(_woven(gate, up), bias, gated=True)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.contiguous()
        number = rows.numel() // self.depth
        out = rows.new_empty((*rows.shape[:-1], self.width))
        packed = scratch(rounded_up(number) * self.depth)
        self._library.kvboost_linear(
            *(self.address, rows.data_ptr(), number, None, out.data_ptr(), packed.data_ptr()),
            torch.get_num_threads(),
        )
        return out


def can_multiply(weight: torch.Tensor) -> bool:
    """Whether there is a kernel for these weights on this machine."""
    n, k = weight.shape
    fits = n % BLOCK == 0 and k % BLOCK == 0
    fits = fits and weight.dtype == torch.bfloat16 and weight.device.type == "cpu"
    return fits and not isinstance(load_library(), str)


def can_norm(weight: torch.Tensor) -> bool:
    """Whether there is a kernel for a norm with this weight on this machine."""
    fits = weight.dtype == torch.bfloat16 and len(weight) % 16 == 0
    return fits and weight.device.type == "cpu" and not isinstance(load_library(), str)


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``weight * rows / rms(rows)``, in bf16; the last dimension is a multiple of 16."""
    rows = rows.contiguous()
    out = torch.empty_like(rows)
    dim = rows.shape[-1]
    _library().kvboost_norm(
        rows.data_ptr(),
        rows.numel() // dim,
        dim,
        weight.data_ptr(),
        eps,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def _library() -> ctypes.CDLL:
    library = load_library()
    assert not isinstance(library, str), library
    return library


def _woven(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Sixteen of one, sixteen of the other, and so on."""
    rest = gate.shape[1:]
    both = torch.stack([part.reshape(-1, HALF, *rest) for part in (gate, up)], dim=1)
    return both.reshape(-1, *rest)


def scratch(num: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Room for ``num`` numbers, whatever torch's defaults are; begins where a cache line does."""
    return torch.empty(num, dtype=dtype, device="cpu")


def rounded_up(rows: int) -> int:
    return -(-rows // BLOCK) * BLOCK


def _aligned(num: int) -> tuple[torch.Tensor, int]:
    """Room for ``num`` bf16 numbers that begins where a cache line does: what holds it, and where
    it begins."""
    room = scratch(num + 32)
    return room, -(-room.data_ptr() // 64) * 64
