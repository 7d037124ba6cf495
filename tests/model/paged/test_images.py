"""Images in requests with pages: rows of images run eagerly, and steps after them in three
dimensions, if the model has these."""

from __future__ import annotations

from typing import Any

import pytest

from support.paged_engines import leaks, use_pages
from support.vision_models import about, picture, vision_engine

IMAGE = picture(1, 50, 30)
PROMPTS: list[Any] = [
    about(IMAGE, "What is this?", "Look: "),
    about(IMAGE, "What is this?", "Before you look, think of something else: "),
    [{"role": "user", "content": "No image at all."}],
]


@pytest.mark.parametrize("name", ["smolvlm", "gemma3", "qwen2_5_vl", "qwen3_vl"])
def test_images_in_pages_are_answered_as_in_buffers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pages(monkeypatch, pages=False)
    with vision_engine(name) as engine:
        expected = [engine.generate(prompt, 4, "baseline").token_ids for prompt in PROMPTS]
    use_pages(monkeypatch)
    with vision_engine(name, max_kv_bytes=1 << 26) as engine:
        options: Any = {"reuse_moved": "always", "recompute_ratio": 1.0}
        alone = [engine.generate(prompt, 4, **options).token_ids for prompt in PROMPTS]
        assert alone == expected
        batch = engine.generate_batch(PROMPTS, 4, "prefix_cache")
        assert [answer.token_ids for answer in batch] == expected
        assert leaks(engine) == []
