"""What an image becomes in a prompt is what transformers' processors write."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3Processor,
    Idefics3Processor,
    InternVLProcessor,
    Qwen2_5_VLProcessor,
    SmolVLMProcessor,
)

from kvboost.model.vision.families import FAMILIES, Tile

TILE = Tile("<r>", 3)
FOUND: dict[str, list[dict[str, Any]]] = {
    "smolvlm": [{"rows": [[0]], "cols": [[0]]}, {"rows": [[2]], "cols": [[3]]}],
    "idefics3": [{"rows": [[0]], "cols": [[0]]}, {"rows": [[2]], "cols": [[3]]}],
    "internvl": [{"num_patches": [1]}, {"num_patches": [4]}],
    "gemma3": [{"num_crops": [0]}],
    "qwen2_5_vl": [{"image_grid_thw": torch.tensor([[1, 4, 6]])}],
    "qwen3_vl": [{"image_grid_thw": torch.tensor([[1, 4, 6]])}],
}
PROCESSORS: dict[str, Any] = {
    "smolvlm": SmolVLMProcessor,
    "idefics3": Idefics3Processor,
    "internvl": InternVLProcessor,
    "gemma3": Gemma3Processor,
    "qwen2_5_vl": Qwen2_5_VLProcessor,
    "qwen3_vl": Qwen2_5_VLProcessor,
}
WITHOUT_VIDEOS = SimpleNamespace(
    image_seq_len=3,
    image_seq_length=3,
    image_token="<r>",
    fake_image_token="<fake_token_around_image>",
    global_image_token="<global-img>",
    global_image_tag="<global-img>",
    start_image_token="<img>",
    end_image_token="</img>",
    full_image_sequence="\n\n<start_of_image><r><r><r><end_of_image>\n\n",
    image_processor=SimpleNamespace(merge_size=2),
)
"""What the processors need of themselves. They cannot be made without torchvision."""


def test_every_family_is_compared() -> None:
    assert set(FOUND) == set(PROCESSORS) == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_text_of_an_image_is_that_of_the_processor(name: str) -> None:
    tile = Tile("<r>", 4) if name.startswith("qwen") else TILE  # patches of one row
    for found in FOUND[name]:
        expected = PROCESSORS[name].replace_image_token(WITHOUT_VIDEOS, found, 0)
        assert FAMILIES[name].text(tile, found) == expected
