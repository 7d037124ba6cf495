"""Images in prompts: where they are, and the token ids of their rows.

To the cache, an image is token ids like any others. Its rows have ids outside every vocabulary,
which are made of a digest of what the model sees. So images are found, compared, moved and
forgotten as text is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvboost.config import ImageLimits
from kvboost.errors import ImageError, PromptError
from kvboost.tokens.hashing import TokenIds, as_token_ids

FIRST_IMAGE_ID = 1 << 30
"""Ids from this one on are rows of images. Each has 30 bits of its image's digest."""
MIN_ROWS = 8
"""A hit that begins or ends inside an image has at least so many rows of it: their ids have 240
bits of the digest. Fewer rows could be those of another image."""
_PARTS = ("image", "image_url")


class FoundImage(Protocol):
    """An image as a model reads it."""

    @property
    def data(self) -> bytes:
        """The file."""

    @property
    def digest(self) -> bytes:
        """Of everything that the model sees of it."""

    @property
    def num_rows(self) -> int:
        """How many rows of the prompt have its features."""

    @property
    def text(self) -> str:
        """The text that replaces its placeholder in a prompt."""

    @property
    def grid(self) -> tuple[int, int] | None:
        """Lines and columns of its rows, if the model numbers them in three dimensions."""


class ImageReader(Protocol):
    """Turns the images of prompts into what the model reads."""

    @property
    def placeholder(self) -> str:
        """The text that the chat template writes for an image."""

    @property
    def row_id(self) -> int:
        """The token of each row of an image."""

    def read(self, data: bytes, limits: ImageLimits) -> FoundImage:
        """The image in a file. Raises ImageError if there is none, or it is too large."""

    def file_of(self, given: object, limits: ImageLimits) -> bytes:
        """The file of an image that is given as bytes, path, data URL or Pillow's image."""


@dataclass(frozen=True)
class PlacedImage:
    """An image in a prompt: its first row, and one past its last. There may be text in between."""

    data: bytes = field(repr=False)
    digest: bytes
    num_rows: int
    start: int
    end: int
    grid: tuple[int, int] | None = None
    """Lines and columns of its rows, if the model numbers them in three dimensions."""


@dataclass(frozen=True)
class PlacedImages:
    """The images of a prompt, in order."""

    token_ids: TokenIds
    """Those of the prompt."""
    placed: tuple[PlacedImage, ...]
    row_id: int
    """The token that the rows have for the model."""

    @cached_property
    def ends(self) -> npt.NDArray[np.int64]:
        """How many rows of images are before each row, and after the last."""
        return np.concatenate([[0], np.cumsum(is_image_row(self.token_ids))]).astype(np.int64)

    def plain(self, token_ids: TokenIds) -> TokenIds:
        """``token_ids`` of the prompt, or longer ones, as the model's vocabulary has them."""
        return as_token_ids(np.where(is_image_row(token_ids), self.row_id, token_ids))

    @property
    def is_spatial(self) -> bool:
        """Whether rows have places in three dimensions, and not their numbers (M-RoPE)."""
        return any(image.grid is not None for image in self.placed)

    def places(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """The places ``[3, rows]`` of rows of the prompt, and of those after it, in time, height
        and width. Text after an image goes on where the image ends in its longer direction."""
        known = self._places
        after = rows - len(self.token_ids)
        inside = np.minimum(rows, len(self.token_ids))
        return known[:, inside] + np.maximum(after, 0)

    def lag_of(self, row: int) -> int:
        """By how much the place of a row is less than its number. Within an image, that of its
        first row counts: the others are placed relative to it."""
        inside = (one.start for one in self.placed if one.start < row < one.end)
        row = next(inside, row)
        return row - int(self.places(np.array([row]))[0, 0])

    @property
    def edges(self) -> tuple[int, ...]:
        """Where images begin and end. There the lag may change, so no chunk crosses one."""
        return tuple(edge for image in self.placed for edge in (image.start, image.end))

    @cached_property
    def _places(self) -> npt.NDArray[np.int64]:
        """The same for all rows of the prompt and the first one after it."""
        places = np.zeros((3, len(self.token_ids) + 1), np.int64)
        row = place = 0
        for image in self.placed:
            assert image.grid is not None
            places[:, row : image.start] = np.arange(place, place + image.start - row)
            place += image.start - row
            lines, columns = image.grid
            places[:, image.start : image.end] = place
            places[1, image.start : image.end] += np.arange(lines).repeat(columns)
            places[2, image.start : image.end] += np.tile(np.arange(columns), lines)
            row, place = image.end, place + max(lines, columns)
        places[:, row:] = np.arange(place, place + places.shape[1] - row)
        return places

    def last_end(self, row: int) -> int:
        """The last row at or before ``row`` at which a hit may end."""
        for image in self.placed:
            if image.start < row < image.end and self._count(image.start, row) < MIN_ROWS:
                return image.start
        return row

    def first_start(self, row: int) -> int:
        """The first row at or after ``row`` at which a hit may begin."""
        for image in self.placed:
            if image.start < row < image.end and self._count(row, image.end) < MIN_ROWS:
                return image.end
        return row

    def uncut_end(self, row: int) -> int:
        """The last row at or before ``row`` that is not inside an image."""
        return next((one.start for one in self.placed if one.start < row < one.end), row)

    def _count(self, start: int, end: int) -> int:
        return int(self.ends[end] - self.ends[start])


@dataclass(frozen=True)
class ReadPrompt:
    """A prompt as token ids, with its images. It can be given wherever a prompt can."""

    token_ids: TokenIds
    images: PlacedImages | None = None


def is_image_row(token_ids: TokenIds) -> npt.NDArray[np.bool_]:
    """Which ids are rows of images."""
    return token_ids >= FIRST_IMAGE_ID


def num_text(token_ids: Sequence[int]) -> int:
    """How many of the first ids are text, and no rows of images."""
    rows = (at for at, token in enumerate(token_ids) if token >= FIRST_IMAGE_ID)
    return next(rows, len(token_ids))


def row_ids(digest: bytes, num_rows: int) -> TokenIds:
    """The ids of an image's rows."""
    bits = np.frombuffer(hashlib.shake_256(digest).digest(4 * num_rows), "<u4")
    return as_token_ids(FIRST_IMAGE_ID | (bits & (FIRST_IMAGE_ID - 1)))


def images_in(messages: Sequence[Mapping[str, Any]]) -> list[object]:
    """The images of a conversation, in order: what the parts of messages give."""
    return [
        _given(part)
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"] or ()
        if isinstance(part, Mapping) and part.get("type") in _PARTS
    ]


def without_files(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same messages for a chat template, which only wants to know where images are."""

    def shown(part: Any) -> Any:
        is_image = isinstance(part, Mapping) and part.get("type") in _PARTS
        return {"type": "image"} if is_image else part

    return [
        {**message, "content": [shown(part) for part in message["content"]]}
        if isinstance(message["content"], Sequence) and not isinstance(message["content"], str)
        else dict(message)
        for message in messages
    ]


def _given(part: Mapping[str, Any]) -> object:
    kind = part["type"]
    given = part.get(kind)
    if kind == "image_url" and isinstance(given, Mapping):
        given = given.get("url")
    if given is None:
        raise ImageError(f"a part of the type {kind!r} has its image under {kind!r}; got {part}")
    return given


def expand(text: str, placeholder: str, images: Sequence[FoundImage]) -> str:
    """The text of a conversation with what each image becomes."""
    pieces = text.split(placeholder)
    if len(pieces) != len(images) + 1:
        raise PromptError(
            f"the chat template wrote {placeholder!r} {len(pieces) - 1} times for {len(images)} "
            "images; leave these characters out of the messages"
        )
    joined = [pieces[0]]
    for image, piece in zip(images, pieces[1:], strict=True):
        joined += (image.text, piece)
    return "".join(joined)


def place(token_ids: TokenIds, images: Sequence[FoundImage], row_id: int) -> ReadPrompt:
    """The prompt that ``token_ids`` are, of a text that was expanded, with its images."""
    rows = np.flatnonzero(token_ids == row_id)
    if len(rows) != sum(image.num_rows for image in images):
        raise PromptError(
            f"the prompt has {len(rows)} tokens of images, and its images have "
            f"{sum(image.num_rows for image in images)}; leave the model's own tokens for images "
            "out of the messages"
        )
    ids = np.array(token_ids)
    placed, first = [], 0
    for image in images:
        own = rows[first : first + image.num_rows]
        first += image.num_rows
        ids[own] = row_ids(image.digest, image.num_rows)
        start, end = int(own[0]), int(own[-1]) + 1
        own_place = start, end, image.grid
        placed.append(PlacedImage(image.data, image.digest, image.num_rows, *own_place))
    whole = as_token_ids(ids)
    return ReadPrompt(whole, PlacedImages(whole, tuple(placed), row_id))
