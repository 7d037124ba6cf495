"""The images of one request, for the forwards that compute their rows."""

from __future__ import annotations

from collections.abc import Generator
from functools import cached_property

import numpy as np
import torch

from kvboost.model.execution.segment import ImageRows
from kvboost.model.vision.tower import Awaited, VisionTower
from kvboost.runtime.computing import Computing, await_device
from kvboost.runtime.request import RequestState
from kvboost.tokens.hashing import TokenIds
from kvboost.tokens.images import is_image_row


class Sight:
    """Gives segments the features of images. The tower runs only for images that have rows to
    compute."""

    def __init__(self, vision: VisionTower | str, state: RequestState) -> None:
        request = state.request
        self._vision = vision
        self._state = state
        self._images = request.images
        self.token_ids: TokenIds = request.vocabulary_ids
        """The prompt's tokens as the model takes them."""
        self._features: dict[bytes, torch.Tensor] = {}

    def rest(self) -> None:
        """Lets go of all features: the prompt is computed, and an answer may take long."""
        self._features.clear()

    def _make(self, steps: Generator[Awaited, object, torch.Tensor]) -> Computing[torch.Tensor]:
        """The features that ``steps`` make. Pauses where they do."""
        while True:
            try:
                is_done = next(steps)
            except StopIteration as end:
                features: torch.Tensor = end.value
                return features
            if is_done is None:
                yield None
            else:
                yield from await_device(self._state, is_done)

    @cached_property
    def whole(self) -> tuple[tuple[int, int], ...]:
        """The rows ``[start, end)`` of images that must be in one forward, as far as they are not
        in place: each attends to those after it."""
        if self._images is None or isinstance(self._vision, str) or not self._vision.sees_ahead:
            return ()
        return tuple((image.start, image.end) for image in self._images.placed)

    def places(self, positions: range | torch.Tensor) -> torch.Tensor | None:
        """The places by which the rows at ``positions``, of the prompt or after it, are rotated;
        None if their places are their positions."""
        if self._images is None or not self._images.is_spatial:
            return None
        return torch.from_numpy(self._images.places(np.asarray(positions)))

    def slice_end(self, start: int, end: int) -> int:
        """Where a slice that begins at ``start`` and should end at ``end`` ends: not inside an
        image that must be whole."""
        for first, last in self.whole:
            if first < end < last:
                return first if first > start else last
        return end

    def rows(self, positions: range | torch.Tensor) -> Computing[ImageRows | None]:
        """The features that image rows at ``positions`` of the prompt get instead of token
        embeddings. Pauses between two parts of an image."""
        images = self._images
        if images is None:
            return None
        where = np.asarray(positions)
        inside = np.flatnonzero(where < len(images.token_ids))
        numbers = inside[is_image_row(images.token_ids[where[inside]])]
        if not len(numbers):
            return None
        assert not isinstance(self._vision, str)
        rows, features = [], []
        for image in images.placed:
            own = numbers[(where[numbers] >= image.start) & (where[numbers] < image.end)]
            if not len(own):
                continue
            if image.digest not in self._features:
                steps = self._vision.features(image.data, image.digest, image.num_rows)
                self._features[image.digest] = yield from self._make(steps)
            every = self._features[image.digest]
            places = images.ends[where[own]] - images.ends[image.start]
            rows.append(torch.from_numpy(own))
            features.append(every[torch.from_numpy(places).to(every.device)])
        first, last = int(where[0]), int(where[-1])
        ahead = tuple(one for one in self.whole if one[0] <= last and one[1] > first)
        return ImageRows(torch.cat(rows), torch.cat(features), ahead)
