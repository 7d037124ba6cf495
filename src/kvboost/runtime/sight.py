"""The images of one request, for the forwards that compute their rows."""

from __future__ import annotations

import numpy as np
import torch

from kvboost.model.segment import ImageRows
from kvboost.model.vision.tower import VisionTower
from kvboost.runtime.computing import Computing
from kvboost.runtime.request import Request
from kvboost.tokens.hashing import TokenIds
from kvboost.tokens.images import is_image_row


class Sight:
    """Gives segments the features of images. The tower runs only for images that have rows to
    compute."""

    def __init__(self, vision: VisionTower | str, request: Request) -> None:
        self._vision = vision
        self._images = request.images
        self.token_ids: TokenIds = request.vocabulary_ids
        """The prompt's tokens as the model takes them."""
        self._features: dict[bytes, torch.Tensor] = {}

    def rows(self, positions: range | torch.Tensor) -> Computing[ImageRows | None]:
        """What the rows of the prompt at ``positions`` are given instead of tokens. Pauses between
        two parts of an image."""
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
                made = yield from self._vision.features(image.data, image.digest, image.num_rows)
                self._features[image.digest] = made
            every = self._features[image.digest]
            places = images.ends[where[own]] - images.ends[image.start]
            rows.append(torch.from_numpy(own))
            features.append(every[torch.from_numpy(places).to(every.device)])
        return ImageRows(torch.cat(rows), torch.cat(features))
