"""DeepStack: features of images that are added to what the first decoder layers give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn


class DeepFeatures:
    """Hooks on decoder layers. Whoever adds features holds the lock of the forward; a forward may
    run within another one."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self._layers = layers
        self._hooked = 0
        self._rows: torch.Tensor | None = None
        self._features: Sequence[torch.Tensor] = ()

    @contextmanager
    def added(self, rows: torch.Tensor | None, features: Sequence[torch.Tensor]) -> Iterator[None]:
        """Adds ``features``, ``[rows, width]`` for each of the first layers, to ``rows`` of the
        forward that runs until the context exits; None adds nothing."""
        features = features[: len(self._layers)]
        for number in range(self._hooked, len(features)):
            self._layers[number].register_forward_hook(partial(self._add, number))
        self._hooked = max(self._hooked, len(features))
        before = self._rows, self._features
        self._rows, self._features = rows, features
        try:
            yield
        finally:
            self._rows, self._features = before

    def _add(self, number: int, layer: nn.Module, args: Any, output: torch.Tensor) -> Any:
        if self._rows is None or number >= len(self._features):
            return None
        changed = output.clone()
        changed[0, self._rows] += self._features[number].to(output)
        return changed
