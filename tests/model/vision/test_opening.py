"""Files are checked before they are decoded."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from kvboost import ImageError
from kvboost.config import ImageLimits
from kvboost.model.vision.opening import file_of, from_data_url, open_image
from support.hostile_images import FILES, PNG, gif_of_frames
from support.vision_models import file_of as saved
from support.vision_models import picture

LIMITS = ImageLimits()


@pytest.mark.parametrize("wrong", FILES)
def test_hostile_files_are_refused(wrong: str) -> None:
    file, said = FILES[wrong]
    with pytest.raises(ImageError, match=said):
        open_image(file, LIMITS)


def test_a_bomb_is_refused_before_its_pixels_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(self: Image.Image) -> None:
        raise AssertionError("decoded")

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", decode)
    with pytest.raises(ImageError, match="pixels"):
        open_image(FILES["a smaller bomb"][0], LIMITS)


MODES = {
    "PNG": ("RGB", "L", "P", "RGBA", "1"),
    "JPEG": ("RGB", "L", "1", "CMYK"),
    "WEBP": ("RGB", "L", "P", "RGBA", "1", "CMYK"),
    "GIF": ("RGB", "L", "P", "RGBA", "1"),
}


@pytest.mark.parametrize(("format", "mode"), [(f, mode) for f in MODES for mode in MODES[f]])
def test_every_format_and_mode_becomes_rgb(format: str, mode: str) -> None:
    file = saved(picture().convert(mode), format)
    image = open_image(file, LIMITS)
    assert image.mode == "RGB" and image.size == (40, 40)


def test_transparent_palettes_become_rgb() -> None:
    image = picture().convert("RGBA")
    image.putalpha(picture(2).convert("L"))
    file = saved(image.quantize(16))
    assert open_image(file, LIMITS).mode == "RGB"


def test_the_first_frame_of_an_animation_counts() -> None:
    found = open_image(gif_of_frames(), LIMITS)
    first = picture(0).convert("P").convert("RGB")
    assert found.size == first.size
    assert found.getpixel((1, 1)) == open_image(saved(picture(0), "GIF"), LIMITS).getpixel((1, 1))


def test_photographs_are_turned_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # taken with the camera turned
    buffer = io.BytesIO()
    picture(1, 40, 20).save(buffer, "JPEG", exif=exif)
    assert open_image(buffer.getvalue(), LIMITS).size == (20, 40)


def test_limits_hold() -> None:
    with pytest.raises(ImageError, match=r"has 40 x 40 pixels; at most 1,599 are allowed"):
        open_image(PNG, ImageLimits(max_pixels=1599))
    assert open_image(PNG, ImageLimits(max_pixels=1600)).size == (40, 40)
    with pytest.raises(ImageError, match=f"has {len(PNG):,} bytes; at most"):
        open_image(PNG, ImageLimits(max_bytes=len(PNG) - 1))


def test_base64_is_measured_before_it_is_decoded() -> None:
    url = f"data:image/png;base64,{base64.b64encode(PNG).decode()}"
    assert from_data_url(url, ImageLimits(max_bytes=len(PNG))) == PNG
    with pytest.raises(ImageError, match=f"has {len(PNG):,} bytes"):
        from_data_url(url, ImageLimits(max_bytes=len(PNG) - 1))


def test_the_word_that_begins_a_data_url_has_no_case() -> None:
    for scheme in ("data", "DATA", "Data"):
        url = f"{scheme}:image/png;base64,{base64.b64encode(PNG).decode()}"
        assert file_of(url, LIMITS) == PNG
    with pytest.raises(ImageError, match="is not base64"):
        file_of("DATA:image/png;base64,\0", LIMITS)


def test_what_is_no_image_is_refused(tmp_path) -> None:
    for given, said in (
        ("data:image/png,abc", "begins with 'data:image/png;base64,'"),
        ("HTTP://example.com/a.png", "KVBoost fetches none"),
        (tmp_path / "none.png", "cannot be read: No such file"),
        (tmp_path, "cannot be read: Is a directory"),
        (None, "not as NoneType"),
    ):
        with pytest.raises(ImageError, match=said):
            file_of(given, LIMITS)
    large = tmp_path / "large.png"
    large.write_bytes(bytes(2000))
    with pytest.raises(ImageError, match="has 2,000 bytes"):
        file_of(large, ImageLimits(max_bytes=1999))
