"""The interface of a quantised checkpoint, whatever its format."""

from __future__ import annotations

from typing import Protocol

import torch

from kvboost.errors import ModelError
from kvboost.model.quantized.layers import Rows
from kvboost.model.quantized.mxfp4 import Mxfp4Weight
from kvboost.model.quantized.weight import QuantizedWeight

CPU = torch.device("cpu")


class QuantizedCheckpoint(Protocol):
    """The tensors of a model by their names in transformers. Reads them when they are asked for."""

    format: str
    """The name that its files give it, for people."""

    def is_quantized(self, name: str) -> bool:
        """Whether the parameter ``name`` is kept as codes."""

    def quantized(self, name: str) -> QuantizedWeight:
        """A weight that is kept as codes."""

    def rows(self, name: str) -> Rows:
        """Reads single rows of a weight that is kept as codes."""

    def digest(self, name: str) -> str:
        """Identifies a weight that is kept as codes."""

    def mxfp4(self, name: str, device: torch.device = CPU) -> Mxfp4Weight | None:
        """The weights ``name`` of experts, made on ``device``; None if they are not in MXFP4."""

    def plain(
        self, name: str, device: torch.device = CPU, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A parameter in ordinary numbers, in ``dtype`` or else as precise as the files have it. A
        GGUF file also gives those that it keeps as codes. Several threads may ask."""


def refused(place: object, tensor: str, why: str, remedy: str) -> ModelError:
    """The error for a tensor that cannot stay packed."""
    return ModelError(f"{place}: the tensor {tensor!r} {why}; {remedy}")


PLAIN = "weights='plain' expands it to ordinary numbers"
"""The remedy that always works for GGUF files."""
