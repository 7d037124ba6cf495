"""Reads the blocks of GGUF files with our kernels."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvboost.model import native


def read_blocks(
    kind: int,
    blocks: npt.NDArray[np.uint8],
    block_bytes: int,
    order: npt.NDArray[np.int64] | None,
    codes: npt.NDArray[np.generic],
    scales: npt.NDArray[np.float32],
    offsets: npt.NDArray[np.float32] | None,
) -> bool:
    """Fills codes, scales and offsets ``[n, ...]`` from rows of blocks, ``[n, bytes of a row]``.
    ``kind`` is the number of their format, ``order`` the row of the blocks that each row of the
    output is. False, and nothing done, if there are no kernels."""
    library = native.any_library()
    if library is None:
        return False
    blocks = np.ascontiguousarray(blocks)
    n, per_row = len(codes), blocks.shape[1] // block_bytes
    order = None if order is None else np.ascontiguousarray(order, np.int64)
    library.kvboost_read_blocks(
        *(
            kind,
            block_bytes,
            codes.shape[1] * codes.itemsize // per_row,
            scales.shape[1] // per_row,
        ),
        blocks.ctypes.data,
        None if order is None else order.ctypes.data,
        *(n, per_row, codes.ctypes.data, scales.ctypes.data),
        None if offsets is None else offsets.ctypes.data,
    )
    return True
