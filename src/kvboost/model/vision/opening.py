"""Opening the files of strangers. What a file claims is checked before it is decoded."""

from __future__ import annotations

import base64
import binascii
import io
import os
from pathlib import Path
from typing import TYPE_CHECKING

from kvboost.config import ImageLimits
from kvboost.errors import ImageError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_LOPSIDED = 200
"""The largest ratio of an image's sides: scaled down, others would have no width."""
_DATA_URL = "data:"
_REMOTE = ("http://", "https://", "ftp://")


def has_pillow() -> bool:
    """Whether the package that decodes images is here."""
    try:
        import PIL.Image  # noqa: F401
    except ModuleNotFoundError:
        return False
    return True


def open_image(data: bytes, limits: ImageLimits) -> Image:
    """The first frame of an image file, upright, in RGB. Raises ImageError if it is none of the
    FORMATS, is broken or exceeds the limits."""
    from PIL import Image, ImageOps

    _check_size(len(data), limits)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"an image has too many pixels: {error}; scale it down") from None
    except Exception:
        raise ImageError(
            f"a file of {len(data):,} bytes is no image in one of the formats {', '.join(FORMATS)}"
        ) from None
    with image:
        width, height = image.size
        if width * height > limits.max_pixels:
            raise ImageError(
                f"an image has {width} x {height} pixels; at most {limits.max_pixels:,} are "
                "allowed; scale it down"
            )
        if max(width, height) > MOST_LOPSIDED * min(width, height):
            raise ImageError(
                f"an image has {width} x {height} pixels; one side may be at most {MOST_LOPSIDED} "
                "times the other; crop it"
            )
        try:
            upright = ImageOps.exif_transpose(image)
            if upright.mode == "P" and "transparency" in upright.info:
                upright = upright.convert("RGBA")  # Pillow warns about the direct way
            return upright.convert("RGB")
        except Exception as error:  # decoders raise whatever they run into
            raise ImageError(
                f"an image in the format {image.format} cannot be decoded, as if it was cut off: "
                f"{type(error).__name__}: {error}"
            ) from None


def file_of(given: object, limits: ImageLimits) -> bytes:
    """The file of an image given as bytes, path, data URL or Pillow's image."""
    if isinstance(given, (bytes, bytearray, memoryview)):
        return bytes(given)
    if isinstance(given, str) and given[: len(_DATA_URL)].lower() == _DATA_URL:
        return from_data_url(given, limits)
    if isinstance(given, str) and given.lower().startswith(_REMOTE):
        raise ImageError(
            "an image is given by an address; KVBoost fetches none: send the file, or a data URL"
        )
    if isinstance(given, (str, os.PathLike)):
        path = Path(given)
        try:
            _check_size(path.stat().st_size, limits)
            return path.read_bytes()
        except OSError as error:
            raise ImageError(f"the image {path} cannot be read: {error.strerror}") from None
    if hasattr(given, "save") and hasattr(given, "convert"):
        buffer = io.BytesIO()
        given.convert("RGB").save(buffer, "PNG", compress_level=1)
        return buffer.getvalue()
    raise ImageError(
        "an image is given as bytes, a path, a data URL or an image of Pillow's, not as "
        f"{type(given).__name__}"
    )


def from_data_url(url: str, limits: ImageLimits) -> bytes:
    """The file in a data URL. Raises ImageError if it is not in base64."""
    head, comma, text = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ImageError(
            f"a data URL begins with 'data:image/png;base64,' or the like, not with {head[:60]!r}"
        )
    return from_base64(text, limits)


def from_base64(text: str, limits: ImageLimits) -> bytes:
    """The file that base64 text holds."""
    text = text.strip()
    _check_size(len(text) // 4 * 3 - text[-2:].count("="), limits)
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"the data of an image is not base64: {error}") from None


def _check_size(num_bytes: int, limits: ImageLimits) -> None:
    if num_bytes > limits.max_bytes:
        raise ImageError(
            f"an image has {num_bytes:,} bytes; at most {limits.max_bytes:,} are allowed; "
            "compress it or scale it down"
        )
