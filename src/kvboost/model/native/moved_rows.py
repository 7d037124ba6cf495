"""What reuse does with moved text, on our kernels: keys are turned, and looked at."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch

from kvboost.model.native.build import load_library
from kvboost.model.native.layers import scratch

LANES = 16
"""Numbers that are read at once, the last of them beyond the end."""


class _Look(ctypes.Structure):
    _fields_ = [
        ("queries", c_void_p),
        ("head_stride", c_int64),
        ("row_stride", c_int64),
        ("keys", c_void_p),
        ("key_stride", c_int64),
        ("absent", c_void_p),
        *((name, c_int32) for name in ("heads", "kv_heads", "dim", "start", "rows")),
        ("scale", c_float),
    ]


def attention_mass(
    query: torch.Tensor, keys: torch.Tensor, scale: float, absent: torch.Tensor
) -> torch.Tensor:
    """How much the last rows, ``[heads, rows, dim]``, attend to each row before them, after
    softmax, averaged over heads and added up over rows. ``keys`` is ``[kv_heads, start + rows,
    dim]``; rows that are ``absent``, ``[start]``, are not seen."""
    library = load_library()
    assert not isinstance(library, str)
    query = query if query.stride(2) == 1 else query.contiguous()
    (heads, rows, dim), kv_heads, start = query.shape, len(keys), len(absent)
    hidden = absent.new_zeros(start + rows + LANES)
    hidden[:start] = absent
    mass = torch.empty(start, dtype=torch.float32, device="cpu")
    threads = min(torch.get_num_threads(), heads)  # more would hold scores of a long prompt idly
    rooms = scratch(threads * library.kvboost_look_bytes(start, rows), torch.uint8)
    look = _Look(
        *(query.data_ptr(), query.stride(0), query.stride(1)),
        *(keys.data_ptr(), keys.stride(0), hidden.data_ptr()),
        *(heads, kv_heads, dim, start, rows, scale),
    )
    library.kvboost_look(ctypes.addressof(look), mass.data_ptr(), rooms.data_ptr(), threads)
    return mass


def move_keys(
    keys: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor], out: torch.Tensor
) -> bool:
    """Writes ``keys``, ``[layers, kv_heads, tokens, dim]``, with channels ``(i, i + pairs)``
    turned by cosine and sine, ``[layers, pairs]``, into ``out``; False where torch has to."""
    cos, sin = (part.contiguous() for part in turns)
    layers, heads, tokens, dim = keys.shape
    pairs = cos.shape[1]
    fits = keys.dtype == out.dtype == torch.bfloat16 and keys.shape == out.shape
    fits = fits and keys.device.type == out.device.type == "cpu"
    fits = fits and all(part.stride()[2:] == (dim, 1) for part in (keys, out))
    fits = fits and pairs % LANES == 0 and 2 * pairs <= dim
    fits = fits and all(
        part.shape == (layers, pairs) and part.dtype == torch.float32 for part in (cos, sin)
    )
    library = load_library() if fits else "no"
    if isinstance(library, str):
        return False
    library.kvboost_move(
        *(keys.data_ptr(), keys.stride(0), keys.stride(1)),
        *(out.data_ptr(), out.stride(0), out.stride(1)),
        *(layers, heads, tokens, dim, pairs),
        *(cos.data_ptr(), sin.data_ptr(), torch.get_num_threads()),
    )
    return True
