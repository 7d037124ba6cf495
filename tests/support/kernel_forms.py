"""The forms of the kernels that this machine can run; tests run over all of them."""

from __future__ import annotations

import pytest
import torch

from kvboost.model import native
from kvboost.model.native.build import FORMS

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
}
"""Of a model whose heads the kernels serve."""
DTYPES = [
    pytest.param(
        dtype,
        id=str(dtype).removeprefix("torch."),
        marks=pytest.mark.skipif(
            not native.is_available(dtype), reason=f"{dtype} kernels: {native.why_not(dtype)}"
        ),
    )
    for dtype in FORMS
]


def each_dtype(function):  # type: ignore[no-untyped-def]
    return pytest.mark.parametrize("dtype", DTYPES)(function)


def close(given: torch.Tensor, expected: torch.Tensor, rounding: int) -> bool:
    """Whether ``given`` equals ``expected`` to ``2**-rounding`` in bfloat16, and to 1e-4 in
    float32, whose sums run in another order."""
    limit = 2.0**-rounding if given.dtype == torch.bfloat16 else 1e-4
    return torch.allclose(given.float(), expected.float(), rtol=limit, atol=limit)
