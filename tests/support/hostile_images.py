"""Files that claim to be images, and are not what they should be."""

from __future__ import annotations

import io
import struct
import zlib

from PIL import Image

from support.vision_models import file_of, picture


def png_of_size(width: int, height: int) -> bytes:
    """A few bytes that claim to be a PNG of any size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(b"\0" * 1000)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def gif_of_frames() -> bytes:
    frames = [picture(seed) for seed in range(3)]
    buffer = io.BytesIO()
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:])
    return buffer.getvalue()


PNG = file_of(picture())
FILES: dict[str, tuple[bytes, str]] = {
    "a bomb": (png_of_size(60_000, 60_000), "too many pixels"),
    "a smaller bomb": (png_of_size(9_000, 9_000), "has 9000 x 9000 pixels; at most 24,000,000"),
    "a line": (png_of_size(30_000, 1), "one side may be at most 200 times the other"),
    "cut off": (PNG[: len(PNG) // 2], "cannot be decoded, as if it was cut off"),
    "cut off in its head": (PNG[:20], "no image in one of the formats"),
    "nothing": (b"", "no image in one of the formats PNG, JPEG, WEBP, GIF"),
    "text": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image in one of the formats"),
    "another format": (file_of(Image.new("RGB", (8, 8)), "BMP"), "no image in one of the formats"),
    "wrong data": (png_of_size(100, 100), "cannot be decoded"),
}
"""What is wrong with a file, the file, and what the error says."""
