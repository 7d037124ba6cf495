"""The weight of a linear layer as integer codes. All formats of files are read to this form."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
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

    def to(self, device: torch.device) -> QuantizedWeight:
        offsets = None if self.offsets is None else self.offsets.to(device)
        return replace(
            self, codes=self.codes.to(device), scales=self.scales.to(device), offsets=offsets
        )

    def part(self, rows: slice | torch.Tensor) -> QuantizedWeight:
        """Some of its rows."""
        offsets = None if self.offsets is None else self.offsets[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], offsets=offsets)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Some of its rows in float32."""
        return self.part(ids).dequantized()

    def digest(self) -> str:
        """Identifies its numbers: their sum as bits, and a sample."""
        found = [f"{self.shape} {self.bits} {self.group}"]
        found += [
            digest_of(part) for part in (self.codes, self.scales, self.offsets) if part is not None
        ]
        return hashlib.blake2b(" ".join(found).encode(), digest_size=16).hexdigest()


def digest_of(tensor: torch.Tensor) -> str:
    """Identifies the bits of a tensor."""
    return digest_of_bytes(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def digest_of_bytes(octets: npt.NDArray[np.uint8]) -> str:
    """Identifies bytes by their sum, eight at a time, and a sample."""
    wide = octets[: len(octets) // 8 * 8].view(np.uint64)
    sample = octets[:: max(1, len(octets) // 64)].tolist()
    return f"{int(wide.sum(dtype=np.uint64))} {octets[len(wide) * 8 :].tolist()} {sample}"
