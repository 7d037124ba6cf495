"""Runs a model's vision tower."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

import torch

from kvboost.model.vision.reader import ImageReader, Pixels

if TYPE_CHECKING:
    from kvboost.model.forward import Forward

KEPT_FEATURE_BYTES = 256 * 1024**2
TILES_ON_GPU = 16
"""Tiles of an image that go through the tower together; on a CPU one, so that others can run
between two."""


class VisionTower:
    """Makes the features of images: one row of the width of the model's embeddings for each row of
    the prompt. Features that were used last are kept. Thread-safe."""

    def __init__(self, forward: Forward, reader: ImageReader) -> None:
        self._forward = forward
        self.reader = reader
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()
        self.num_images = 0
        """How many images have gone through the tower."""

    @property
    def sees_ahead(self) -> bool:
        """Whether the rows of an image attend to those after them, up to its end."""
        return self.reader.family.sees_ahead

    def features(
        self, data: bytes, digest: bytes, num_rows: int
    ) -> Generator[None, object, torch.Tensor]:
        """The features ``[num_rows, width]`` of an image, on the model's device. Yields between its
        parts."""
        with self._lock:
            if (known := self._kept.get(digest)) is not None:
                self._kept.move_to_end(digest)
                return known
        pixels = self.reader.pixels(data, digest)
        axis = self.reader.family.tile_axis
        total = pixels["pixel_values"].shape[axis]
        step = 1 if self._forward.device.type == "cpu" else TILES_ON_GPU
        parts: list[torch.Tensor] = []
        for start in range(0, total, step):
            if parts:
                yield None
            count = min(step, total - start)
            tiles = {name: one.narrow(axis, start, count) for name, one in pixels.items()}
            parts.append(self._run(tiles))
        self.num_images += 1
        found = torch.cat(parts)
        if found.shape[0] != num_rows:
            raise RuntimeError(f"{found.shape[0]} features for {num_rows} rows of an image")
        self._keep(digest, found)
        return found

    def _run(self, tiles: Pixels) -> torch.Tensor:
        """The features of some tiles."""
        forward = self._forward
        with forward.lock, torch.inference_mode():
            given = {name: one.to(forward.device) for name, one in tiles.items()}
            given["pixel_values"] = given["pixel_values"].to(forward.dtype)
            found: Any = forward.model.get_image_features(**given, return_dict=True).pooler_output
            if isinstance(found, (list, tuple)):
                found = torch.cat(found)
            return found.reshape(-1, found.shape[-1]).to(forward.dtype)

    def _keep(self, digest: bytes, features: torch.Tensor) -> None:
        with self._lock:
            if digest in self._kept:
                return
            self._kept[digest] = features
            self._kept_bytes += features.nbytes
            while self._kept_bytes > KEPT_FEATURE_BYTES and len(self._kept) > 1:
                _, old = self._kept.popitem(last=False)
                self._kept_bytes -= old.nbytes
