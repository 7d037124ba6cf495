"""Reading images: digests, and what is kept."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

from kvboost import ModelError
from kvboost.config import ImageLimits
from kvboost.model.vision import reader as module
from kvboost.model.vision.reader import ImageReader, make_reader
from support.vision_models import (
    file_of,
    image_processor,
    make_vision_model,
    picture,
    vision_tokenizer,
)

LIMITS = ImageLimits()


def make(name: str = "internvl") -> ImageReader:
    config = make_vision_model(name).config
    return make_reader(config, vision_tokenizer(name), image_processor(name))


def test_the_digest_is_that_of_what_the_model_sees() -> None:
    reader, image = make(), picture(1)
    png, bmp = (reader.read(file_of(image, kind), LIMITS) for kind in ("PNG", "WEBP"))
    assert png.digest != bmp.digest, "WebP loses something"
    with_note = picture(1)
    with_note.info["note"] = "other bytes"
    lossless = reader.read(file_of(with_note, "PNG") + b"trailing", LIMITS)
    assert lossless.digest == png.digest and lossless.data != png.data
    assert reader.read(file_of(picture(2)), LIMITS).digest != png.digest


def test_a_reader_in_another_process_reads_alike() -> None:
    reader = make()
    other: ImageReader = pickle.loads(pickle.dumps(reader))
    data = file_of(picture(3))
    found = reader.read(data, LIMITS)
    assert other.read(data, LIMITS) == found
    pixels = other.pixels(data, found.digest)
    assert torch.equal(pixels["pixel_values"], reader.pixels(data, found.digest)["pixel_values"])
    with pytest.raises(ModelError, match="different versions of Pillow or transformers"):
        other.pixels(data, b"another")


def test_a_file_is_processed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, processed = make(), 0
    process = reader._process

    def counted(*given: Any) -> Any:
        nonlocal processed
        processed += 1
        return process(*given)

    monkeypatch.setattr(reader, "_process", counted)
    data = file_of(picture(4))
    first = reader.read(data, LIMITS)
    assert reader.read(data, LIMITS) == first and reader.pixels(data, first.digest)
    assert processed == 1
    monkeypatch.setattr(reader.kept, "most_bytes", 1)
    second = reader.read(file_of(picture(5)), LIMITS)
    assert reader.kept_pixels(first.digest) is None
    assert reader.kept_pixels(second.digest) is not None, "the last one stays"
    reader.pixels(data, first.digest)
    assert processed == 3 and reader.kept_pixels(second.digest) is None
    monkeypatch.setattr(module, "KEPT_IMAGES", 1)
    reader.read(file_of(picture(6)), LIMITS)
    assert len(reader._found) == 1
    monkeypatch.setattr(module, "KEPT_IMAGES", 3)
    monkeypatch.setattr(module, "KEPT_TEXT", len(second.text))
    reader.read(file_of(picture(7)), LIMITS)
    assert len(reader._found) == 1 and reader._text_size <= len(second.text), "texts are long"


def test_a_tokenizer_without_tokens_of_images_is_refused() -> None:
    config = make_vision_model("internvl").config
    with pytest.raises(ModelError, match="has no token '<IMG_CONTEXT>'"):
        make_reader(config, vision_tokenizer("smolvlm"), image_processor("internvl"))
