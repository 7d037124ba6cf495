"""An embedding that stays in host memory: a forward needs one row of it for each token."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from kvboost.model.quantized.layers import QuantizedEmbedding


class HostEmbedding(nn.Module):
    """Sends the rows of tokens to the device. The embedding on the host is no part of the model:
    transformers takes the device of the first parameter for the model's."""

    def __init__(self, embedding: Any, device: torch.device) -> None:
        super().__init__()
        self.num_embeddings: int = embedding.num_embeddings
        self.embedding_dim: int = embedding.embedding_dim
        self._on_host = (embedding,)
        self._device = device

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self._on_host[0](ids.cpu())
        return rows.to(self._device)


def host_embedding(model: PreTrainedModel) -> Any:
    """The embedding of a model, if it can stay on the host: one that is no output head as well;
    None if it cannot."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if isinstance(embedding, QuantizedEmbedding):
        return embedding  # the head has codes of its own
    if type(embedding) is not nn.Embedding or head is None or head.weight is embedding.weight:
        return None
    return embedding
