"""Runs a model's vision tower."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch

from kvboost.model.vision.kept import Kept
from kvboost.model.vision.reader import ImageReader, Pixels

if TYPE_CHECKING:
    from kvboost.model.execution.forward import Forward

KEPT_FEATURE_BYTES = 256 * 1024**2
Awaited = Callable[[], bool] | None
"""Whether what a request waits for is there; None if it waits for nothing."""
POLL_SECONDS = 0.005
"""The seconds to wait for another thread before others run again, if there is nothing else to
do."""
TILES_ON_GPU = 16
"""Tiles of an image that go through the tower together; on a CPU one, so that others can run
between two."""


class VisionTower:
    """Makes the features of images: for each row of the prompt what replaces the embedding of a
    token, and what is added after each of the first layers, if the model does that (DeepStack).
    Features that were used last are kept. Thread-safe."""

    def __init__(self, forward: Forward, reader: ImageReader) -> None:
        self._forward = forward
        self.reader = reader
        self.kept = Kept[torch.Tensor](KEPT_FEATURE_BYTES, lambda features: features.nbytes)
        self.num_images = 0
        """The number of images that have gone through the tower."""

    @property
    def sees_ahead(self) -> bool:
        """Whether the rows of an image attend to those after them, up to its end."""
        return self.reader.family.sees_ahead

    @cached_property
    def _text_modules(self) -> frozenset[str]:
        """The paths of the modules that no image goes through on its way to its rows."""
        model = self._forward.model
        text = set(map(id, model.get_decoder().modules())) | {id(model.get_output_embeddings())}
        return frozenset(name for name, one in model.named_modules() if id(one) in text)

    def is_changed_by(self, modules: Iterable[str]) -> bool:
        """Whether an adapter of these modules, by their paths, changes how the model sees."""
        return not self._text_modules.issuperset(modules)

    def features(
        self, data: bytes, digest: bytes, num_rows: int
    ) -> Generator[Awaited, object, torch.Tensor]:
        """The features ``[num_rows, parts, width]`` of an image, on the model's device. Yields
        between its tiles, and while another thread decodes it: what tells whether it has."""
        if (known := self.kept.get(digest)) is not None:
            return known
        pixels = self.reader.kept_pixels(digest)
        if pixels is None:
            decoded = _in_thread(partial(self.reader.pixels, data, digest))
            while not decoded.done():
                yield decoded.done
                wait([decoded], timeout=POLL_SECONDS)
            pixels = decoded.result()
        axis = self.reader.family.tile_axis
        total = 1 if axis is None else pixels["pixel_values"].shape[axis]
        step = 1 if self._forward.shape.traits.is_host else TILES_ON_GPU
        parts: list[torch.Tensor] = []
        for start in range(0, total, step):
            if parts:
                yield None
            tiles = pixels
            if axis is not None:
                count = min(step, total - start)
                tiles = {name: one.narrow(axis, start, count) for name, one in pixels.items()}
            parts.append(self._run(tiles))
        self.num_images += 1
        found = torch.cat(parts)
        if found.shape[0] != num_rows:
            raise RuntimeError(f"{found.shape[0]} features for {num_rows} rows of an image")
        self.kept.put(digest, found)
        return found

    def _run(self, tiles: Pixels) -> torch.Tensor:
        """The features of some tiles."""
        forward = self._forward
        with forward.lock, torch.inference_mode():
            given = {name: one.to(forward.device) for name, one in tiles.items()}
            given["pixel_values"] = given["pixel_values"].to(forward.dtype)
            found: Any = forward.model.get_image_features(**given, return_dict=True)
            deep = getattr(found, "deepstack_features", None) or ()
            parts = [_rows(part) for part in (found.pooler_output, *deep)]
            return torch.stack(parts, 1).to(forward.dtype)


def _in_thread(work: Callable[[], Pixels]) -> Future[Pixels]:
    """The result of ``work``, which runs in a thread of its own."""
    made: Future[Pixels] = Future()

    def run() -> None:
        try:
            made.set_result(work())
        except BaseException as error:
            made.set_exception(error)

    threading.Thread(target=run, name="kvboost-image", daemon=True).start()
    return made


def _rows(features: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """The features that a tower gives, for each image or tile or for all, as ``[rows, width]``."""
    whole = features if isinstance(features, torch.Tensor) else torch.cat(list(features))
    return whole.reshape(-1, whole.shape[-1])
