"""An embedding that stays in host memory: a forward needs one row of it for each token."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel


class HostEmbedding(nn.Module):
    """Sends the rows of tokens to the device. The table is no parameter: it is not where the model
    is, and transformers takes the device of the first parameter for the model's."""

    def __init__(self, embedding: nn.Embedding, device: torch.device) -> None:
        super().__init__()
        self.num_embeddings = embedding.num_embeddings
        self.embedding_dim = embedding.embedding_dim
        self._table = (embedding.weight.detach(),)
        self._device = device

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = self._table[0].index_select(0, ids.flatten().cpu())
        return rows.to(self._device).view(*ids.shape, self.embedding_dim)


def host_embedding(model: PreTrainedModel) -> nn.Embedding | None:
    """The embedding of a model, if it can stay on the host: one that is no output head as well."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if type(embedding) is not nn.Embedding or head is None:
        return None
    return None if head.weight is embedding.weight else embedding
