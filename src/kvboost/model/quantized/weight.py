"""The weight of a linear layer as integer codes. All formats of files are read to this form."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight ``[n, k]``; the ``group`` columns of a row that share a scale are neighbours:

        weight[i, j] = codes[i, j] * scales[i, j // group] + offsets[i, j // group]

    Codes of 4 bits are 0 to 15, two in a byte: column 2j in the low half, 2j + 1 in the high half.
    Codes of 8 bits are -128 to 127.
    """

    codes: torch.Tensor
    """uint8 ``[n, k / 2]`` for 4 bits, int8 ``[n, k]`` for 8."""
    scales: torch.Tensor
    """float32 or float16, ``[n, k / group]``."""
    offsets: torch.Tensor | None
    """As the scales; without them they are 0."""
    bits: int
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        n, k = self.codes.shape
        return n, k * 8 // self.bits

    @property
    def nbytes(self) -> int:
        """The memory of all its parts."""
        parts = (self.codes, self.scales, self.offsets)
        return sum(part.nbytes for part in parts if part is not None)

    def dequantized(self) -> torch.Tensor:
        """The weight in float32. It is the reference for all kernels."""
        n, k = self.shape
        codes = self.codes
        if self.bits == 4:
            codes = torch.stack([codes & 15, codes >> 4], dim=-1)
        grouped = codes.reshape(n, -1, self.group).float() * self.scales.float()[..., None]
        if self.offsets is not None:
            grouped = grouped + self.offsets.float()[..., None]
        return grouped.reshape(n, k)
