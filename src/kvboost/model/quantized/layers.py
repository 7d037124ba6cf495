"""Layers whose weights stay quantised."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from kvboost.model.quantized.experts import kernel_of, num_packed, packed_experts
from kvboost.model.quantized.weight import QuantizedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Rows = Callable[[torch.Tensor], torch.Tensor]
"""Gives rows of a quantised embedding: float32 ``[len(ids), width]``."""
BLOCK_BYTES = 16 << 20
"""How many bytes of a weight are dequantised at a time without a kernel."""


class Product(Protocol):
    """Rows times a quantised weight. It holds all that it needs of the weight."""

    kernel: str
    """The name of what computes it; KV of different kernels is not mixed."""
    num_bytes: int

    def __call__(self, rows: torch.Tensor) -> torch.Tensor: ...


class BlockProduct:
    """Dequantises the weight block by block and multiplies with torch: slow, and right anywhere."""

    kernel = "torch"

    def __init__(self, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> None:
        self._weight, self._bias = weight, bias
        self.num_bytes = weight.nbytes

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        n, k = self._weight.shape
        step = max(1, BLOCK_BYTES // (4 * k))
        out = rows.new_empty((*rows.shape[:-1], n))
        for start in range(0, n, step):
            some = slice(start, start + step)
            part = self._weight.part(some).dequantized().to(rows.dtype)
            out[..., some] = nn.functional.linear(rows, part)
        return out if self._bias is None else out + self._bias.to(out.dtype)


class QuantizedLinear(nn.Module):
    """A linear layer for inference. It is not an ``nn.Linear`` and has no ``weight``: nothing can
    train it or take its weight for a float tensor. An adapter's hook can add to its output."""

    def __init__(
        self, shape: tuple[int, int], product: Product, *, has_bias: bool, digest: str
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = shape
        self.product = product
        self.has_bias = has_bias
        """Whether the product adds one."""
        self.digest = digest
        """Identifies codes, scales, offsets and bias."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.product(rows)

    def extra_repr(self) -> str:
        return f"{self.in_features}, {self.out_features}, kernel={self.product.kernel}"


class QuantizedEmbedding(nn.Module):
    """An embedding that dequantises the rows that are asked for."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        rows: Rows,
        *,
        dtype: torch.dtype,
        digest: str,
        scale: float | None = None,
    ) -> None:
        """Rows are multiplied by ``scale``, if there is one, in ``dtype``."""
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self._rows, self._dtype, self._scale = rows, dtype, scale
        self.digest = digest

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self._rows(ids.reshape(-1)).to(self._dtype)
        if self._scale is not None:
            found = found * torch.tensor(self._scale, dtype=self._dtype, device=found.device)
        return found.view(*ids.shape, self.embedding_dim)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


def num_weights(model: PreTrainedModel, *, embeddings: bool = True) -> int:
    """The number of a model's parameters, quantised or not; perhaps without its embedding, and
    without the output head that is the same."""
    total = model.num_parameters(exclude_embeddings=not embeddings)
    tied = model.config.get_text_config().tie_word_embeddings
    head = model.get_output_embeddings() if tied else None
    for module in model.modules():
        if isinstance(module, QuantizedLinear) and module is not head:
            total += module.out_features * (module.in_features + module.has_bias)
        elif isinstance(module, QuantizedEmbedding) and embeddings:
            total += module.num_embeddings * module.embedding_dim
    return int(total) + num_packed(model)


def packed_identity(model: nn.Module) -> dict[str, Any]:
    """Facts on which the KV of a model with quantised layers depends besides its parameters and
    buffers: its codes, and the kernels that multiply with them. Empty for other models."""
    found: dict[str, Any] = {}
    kernels = set()
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear | QuantizedEmbedding):
            found[name] = module.digest
        if isinstance(module, QuantizedLinear):
            kernels.add(module.product.kernel)
    for name, _ in packed_experts(model):  # their codes are buffers, exact in every kernel
        found[name] = "MXFP4"
    return {"packed": found, "kernels": sorted(kernels)} if found else {}


def weights_of(model: nn.Module) -> str:
    """``"packed"`` with the kernels that multiply with quantised weights, or ``"plain"``."""
    of_experts = {kernel_of(experts) for _, experts in packed_experts(model)}
    kernels = sorted({*packed_identity(model).get("kernels", ()), *of_experts})
    return f"packed ({', '.join(kernels)})" if kernels else "plain"
