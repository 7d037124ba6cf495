"""Images as token ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import transformers

from kvboost import PromptError
from kvboost.tokens.hashing import as_token_ids
from kvboost.tokens.images import (
    FIRST_IMAGE_ID,
    MIN_ROWS,
    PlacedImages,
    expand,
    is_image_row,
    num_text,
    place,
    row_ids,
)

ROW = 7


@dataclass(frozen=True)
class Image:
    digest: bytes = b"one"
    num_rows: int = 12
    grid: tuple[int, int] | None = None
    text: str = "<>"
    data: bytes = b""


def placed(*runs: int, grid: tuple[int, int] | None = None) -> PlacedImages:
    """A prompt of 5 tokens of text, an image of so many rows, 5 tokens of text, and so on."""
    ids, images = [1] * 5, []
    for number, rows in enumerate(runs):
        ids += [*[ROW] * rows, *[1] * 5]
        images.append(Image(bytes([number]), rows, grid))
    found = place(as_token_ids(ids), images, ROW).images
    assert found is not None
    return found


def test_ids_of_rows_are_outside_every_vocabulary_and_differ() -> None:
    ids = row_ids(b"a", 1000)
    assert ids.dtype == np.int32 and ids.min() >= FIRST_IMAGE_ID
    assert len(np.unique(ids)) > 990
    assert (row_ids(b"a", 10) == ids[:10]).all()
    assert (row_ids(b"b", 1000) != ids).sum() > 990


def test_rows_are_placed_in_order() -> None:
    images = placed(12, 20)
    assert [(one.start, one.end) for one in images.placed] == [(5, 17), (22, 42)]
    assert is_image_row(images.token_ids).sum() == 32
    plain = images.plain(as_token_ids([*images.token_ids, 1, 2]))
    assert (plain == ROW).sum() == 32 and list(plain[-2:]) == [1, 2]
    assert num_text(images.token_ids.tolist()) == 5 and num_text([1, 2]) == 2


def test_hits_do_not_end_after_few_rows_of_an_image() -> None:
    images = placed(12)
    for row in range(5, 5 + MIN_ROWS):
        assert images.last_end(row) == 5
    for row in (4, 5 + MIN_ROWS, 16, 17, 20):
        assert images.last_end(row) == row
    for row in range(17 - MIN_ROWS + 1, 17):
        assert images.first_start(row) == 17
    for row in (0, 5, 17 - MIN_ROWS, 17, 20):
        assert images.first_start(row) == row


def test_texts_with_other_tokens_of_images_are_refused() -> None:
    assert expand("a<i>b<i>c", "<i>", [Image(text="X"), Image(text="YY")]) == "aXbYYc"
    with pytest.raises(PromptError, match="wrote '<i>' 2 times for 1 images"):
        expand("a<i>b<i>c", "<i>", [Image()])
    with pytest.raises(PromptError, match="has 13 tokens of images, and its images have 12"):
        place(as_token_ids([ROW] * 13), [Image()], ROW)


def test_places_are_those_of_transformers() -> None:
    images = placed(12, 12, grid=(3, 4))
    ids = torch.from_numpy(images.plain(images.token_ids).astype(np.int64))[None]
    kinds = transformers.models.qwen3_vl.modeling_qwen3_vl
    config = transformers.Qwen3VLConfig()
    one = type("Stub", (), {"config": config})()
    one.get_vision_position_ids = kinds.Qwen3VLModel.get_vision_position_ids.__get__(one)
    expected, delta = kinds.Qwen3VLModel.get_rope_index(
        one, ids, (ids == ROW).int(), torch.tensor([[1, 6, 8]] * 2)
    )
    total = len(images.token_ids)
    found = images.places(np.arange(total + 6))
    assert (found[:, :total] == expected[:, 0].numpy()).all()
    assert (found[:, total:] == np.arange(total, total + 6) + int(delta)).all()
    some = np.array([3, 8, 30, total + 2])
    assert (images.places(some) == found[:, some]).all() and images.is_spatial
    assert not placed(12).is_spatial


def test_an_uncut_prompt_ends_outside_of_images() -> None:
    images = placed(12, 20)
    ends = [images.uncut_end(row) for row in (3, 5, 6, 16, 17, 23, 44)]
    assert ends == [3, 5, 5, 5, 17, 22, 44]
