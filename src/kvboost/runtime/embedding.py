"""Embeddings from the loaded model: the mean of its last hidden states, in slices."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack

import numpy as np
import numpy.typing as npt
import torch

from kvboost.errors import ContextLengthError
from kvboost.model.execution.embedding import by_length, normalised, run_steps
from kvboost.model.execution.segment import Segment
from kvboost.runtime.runtime import Runtime

Embedding = Generator[None, None, npt.NDArray[np.float32]]
"""Each ``next`` computes one slice; the result is ``[inputs, dimensions]``."""


class LoadedModelEmbedder:
    """Embeds with the model that answers requests. It was trained to continue text and not to
    compare texts, so a model made for embeddings finds the right passage more often."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._slice = runtime.backend.embedded_rows

    @property
    def dimensions(self) -> int:
        config = self._runtime.model.forward.model.config
        return int(config.get_text_config().hidden_size)

    @property
    def max_tokens(self) -> int | None:
        return self._runtime.model.context_length

    def embed(self, batch: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """The embeddings of ``batch``, at once."""
        for token_ids in batch:
            if self.max_tokens is not None and len(token_ids) > self.max_tokens:
                raise ContextLengthError(len(token_ids), self.max_tokens)
        return run_steps(self.steps(batch))

    def steps(self, batch: Sequence[Sequence[int]]) -> Embedding:
        """Short inputs share forwards; a long one is computed in slices. Nothing is read from the
        cache, which has keys and values but no hidden states, and nothing is kept."""
        found = np.empty((len(batch), self.dimensions), np.float32)
        for group in by_length(batch, self._slice, padded=False):
            yield
            ids = [torch.tensor(batch[index]) for index in group]
            with ExitStack() as stack:
                pool = self._runtime.pool
                kvs = [stack.enter_context(pool.lend(len(some))) for some in ids]
                sums = torch.zeros(len(group), self.dimensions, device=self._runtime.model.device)
                for start in range(0, len(ids[0]), self._slice):
                    if start:
                        yield
                    segments = [
                        Segment(
                            kv,
                            some[start : start + self._slice],
                            range(start, min(len(some), start + self._slice)),
                        )
                        for kv, some in zip(kvs, ids, strict=True)
                    ]
                    for row, hidden in enumerate(self._runtime.model.forward.hidden(segments)):
                        sums[row] += hidden.float().sum(0)
            found[group] = normalised(sums)
        return found
