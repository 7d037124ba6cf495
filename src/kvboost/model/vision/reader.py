"""Reads the images of prompts, and makes of them what a model's vision tower takes."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from kvboost.config import ImageLimits
from kvboost.errors import ImageError, ModelError
from kvboost.model.vision.families import FAMILIES, Family, Tile
from kvboost.model.vision.kept import Kept
from kvboost.model.vision.opening import file_of, open_image

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

Pixels = dict[str, torch.Tensor]
"""The inputs of a vision tower, by the names of its arguments."""

DECODERS = 2
"""Images that are decoded at once: each takes ten bytes for a pixel meanwhile."""
KEPT_PIXEL_BYTES = 256 * 1024**2
KEPT_IMAGES = 4096
"""Digests that are known of files."""
KEPT_TEXT = 32 * 1024**2
"""Characters of the texts that are kept with them: a large image of Qwen-VL has 200,000."""
_ANY = ImageLimits(sys.maxsize, sys.maxsize, sys.maxsize)
"""For images that were read before."""


@dataclass(frozen=True)
class FoundImage:
    """An image as a model reads it: ``FoundImage`` of ``tokens/images.py``."""

    data: bytes
    digest: bytes
    num_rows: int
    text: str
    grid: tuple[int, int] | None = None
    """Lines and columns of its rows, if the model numbers them in three dimensions."""


class ImageReader:
    """Reads images for one model. Thread-safe; it can be pickled, so that another process reads
    them just as this one."""

    def __init__(self, model_type: str, tile: Tile, row_id: int, processor: Any) -> None:
        """``processor``: the image processor of transformers. ``row_id``: the token of each row."""
        self._model_type = model_type
        self._tile = tile
        self.row_id = row_id
        self._processor = processor
        self._lock = threading.Lock()
        self._decoders = threading.Semaphore(DECODERS)
        self._found: OrderedDict[bytes, FoundImage] = OrderedDict()
        """By the hash of the file, without the file."""
        self._text_size = 0
        self.kept = Kept[Pixels](KEPT_PIXEL_BYTES, _nbytes)

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageReader, (self._model_type, self._tile, self.row_id, self._processor)

    @property
    def family(self) -> Family:
        return FAMILIES[self._model_type]

    @property
    def placeholder(self) -> str:
        return self.family.placeholder

    def file_of(self, given: object, limits: ImageLimits) -> bytes:
        """The file of an image that is given as bytes, path, data URL or Pillow's image."""
        return file_of(given, limits)

    def read(self, data: bytes, limits: ImageLimits) -> FoundImage:
        """The image in a file. Raises ImageError if there is none, or it is too large."""
        name = hashlib.blake2b(data, digest_size=32).digest()
        with self._lock:
            known = self._found.get(name)
        if known is not None:
            return replace(known, data=data)
        pixels, text, grid = self._process(data, limits)
        digest = _digest(self._model_type, text, pixels)
        rows = text.count(self._tile.row)
        found = FoundImage(data, digest, rows, text, grid)
        self._remember(name, replace(found, data=b""))
        self.kept.put(digest, pixels)
        return found

    def _remember(self, name: bytes, found: FoundImage) -> None:
        """Keeps what is known of a file."""
        with self._lock:
            if name in self._found:
                return
            self._found[name] = found
            self._text_size += len(found.text)
            while len(self._found) > KEPT_IMAGES or self._text_size > KEPT_TEXT:
                _, old = self._found.popitem(last=False)
                self._text_size -= len(old.text)

    def kept_pixels(self, digest: bytes) -> Pixels | None:
        """The vision tower's input for an image, if it was made a short while ago."""
        return self.kept.get(digest)

    def pixels(self, data: bytes, digest: bytes) -> Pixels:
        """The same of an image that was read, here or in another process."""
        if (known := self.kept_pixels(digest)) is not None:
            return known
        pixels, text, _ = self._process(data, _ANY)
        if _digest(self._model_type, text, pixels) != digest:
            raise ModelError(
                "an image was read as another one before: the processes of this server have "
                "different versions of Pillow or transformers; install the same in all"
            )
        self.kept.put(digest, pixels)
        return pixels

    def _process(
        self, data: bytes, limits: ImageLimits
    ) -> tuple[Pixels, str, tuple[int, int] | None]:
        """The tower's input, the text of the image, and its grid."""
        family = self.family
        with self._decoders:
            image = open_image(data, limits)
            try:
                found = self._processor([image], return_tensors="pt", **family.options)
            except (ValueError, ZeroDivisionError, RuntimeError) as error:
                raise ImageError(
                    f"an image of {image.width} x {image.height} pixels cannot be scaled for this "
                    f"model: {error}"
                ) from None
        text = family.text(self._tile, found)
        grid = None if family.grid is None else family.grid(self._processor, found)
        return {name: found[name] for name in family.pixels if name in found}, text, grid


def make_reader(
    config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase, processor: Any
) -> ImageReader:
    """The reader of a model whose type is among the FAMILIES. Raises ModelError if its tokenizer
    lacks the tokens of images."""
    family, row_id = FAMILIES[config.model_type], int(config.image_token_id)
    row = tokenizer.convert_ids_to_tokens(row_id)
    tile = Tile(str(row), int(family.tile_rows(config)))
    ids = tokenizer(family.placeholder, add_special_tokens=False)["input_ids"]
    if row is None or len(ids) != 1:
        raise ModelError(
            f"the tokenizer of this {config.model_type} model has no token {family.placeholder!r} "
            f"or none with the id {row_id}, so it cannot read images"
        )
    return ImageReader(config.model_type, tile, row_id, processor)


def _digest(model_type: str, text: str, pixels: Pixels) -> bytes:
    """Of everything that a model sees of an image."""
    digest = hashlib.blake2b(f"{model_type}\0{text}\0".encode(), digest_size=32)
    for name, values in sorted(pixels.items()):
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}\0".encode())
        digest.update(np.ascontiguousarray(values.numpy()).view(np.uint8).data)
    return digest.digest()


def _nbytes(pixels: Pixels) -> int:
    return sum(values.nbytes for values in pixels.values())
