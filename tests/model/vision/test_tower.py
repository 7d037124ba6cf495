"""The vision tower runs once for an image, tile by tile, and keeps what was used last."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from kvboost import ImageError, KVBoost
from kvboost.config import ImageLimits
from kvboost.model.vision.tower import VisionTower
from support.vision_models import file_of, forget_images, picture, vision_engine

WIDE = file_of(picture(1, 50, 30))


@pytest.fixture
def engine() -> Iterator[KVBoost]:
    with vision_engine("smolvlm") as made:
        yield made


def run(tower: VisionTower, data: bytes) -> tuple[torch.Tensor, int]:
    """The features of an image, and how often others could run meanwhile."""
    found = tower.reader.read(data, ImageLimits())
    steps: Any = tower.features(data, found.digest, found.num_rows)
    pauses = 0
    while True:
        try:
            next(steps)
            pauses += 1
        except StopIteration as end:
            return end.value, pauses


def test_others_run_between_two_tiles(engine: KVBoost) -> None:
    tower: Any = engine.model.vision
    features, pauses = run(tower, WIDE)
    assert features.shape[1:] == (1, 64) and features.shape[0] % 9 == 0
    assert pauses == features.shape[0] // 9 - 1 > 0
    again, pauses = run(tower, WIDE)
    assert again is features and pauses == 0 and tower.num_images == 1


def test_others_run_while_a_thread_decodes(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the pixels are not at hand, as in the engine's process beside an API process."""
    tower: Any = engine.model.vision
    expected, _ = run(tower, WIDE)
    found = tower.reader.read(WIDE, ImageLimits())
    forget_images(tower)
    go, read = threading.Event(), tower.reader.pixels

    def slowly(*given: Any) -> Any:
        assert go.wait(20)
        return read(*given)

    monkeypatch.setattr(tower.reader, "pixels", slowly)
    steps = tower.features(WIDE, found.digest, found.num_rows)
    is_done = next(steps)
    assert not is_done() and next(steps) is not None
    go.set()
    while True:
        try:
            next(steps)
        except StopIteration as end:
            assert torch.equal(end.value, expected)
            break
    forget_images(tower)
    with pytest.raises(ImageError):
        list(tower.features(b"no image", b"digest", 1))


def test_features_have_a_budget(engine: KVBoost, monkeypatch: pytest.MonkeyPatch) -> None:
    tower: Any = engine.model.vision
    monkeypatch.setattr(tower.kept, "most_bytes", 1)
    run(tower, WIDE)
    run(tower, file_of(picture(2)))
    run(tower, file_of(picture(2)))
    assert tower.num_images == 2, "the last one stays"
    run(tower, WIDE)
    assert tower.num_images == 3


def test_the_tower_keeps_its_own_attention(engine: KVBoost) -> None:
    engine.generate("text", 1)
    config = engine.model.forward.model.config
    assert config.text_config._attn_implementation == "kvboost"
    assert config.vision_config._attn_implementation == "sdpa"
