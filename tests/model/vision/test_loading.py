"""Models that see, from their folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvboost import ImageError, KVBoost
from support.vision_models import (
    about,
    image_processor,
    make_vision_model,
    picture,
    vision_tokenizer,
)

QUESTION = about(picture(1, 50, 30), "What is this?")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    whole: Path = tmp_path_factory.mktemp("models")
    for name in ("smolvlm", "qwen3_vl"):
        folder = whole / name
        make_vision_model(name).save_pretrained(folder)
        vision_tokenizer(name).save_pretrained(folder)
        image_processor(name).save_pretrained(folder)
    return whole


@pytest.mark.parametrize("name", ("smolvlm", "qwen3_vl"))
def test_a_folder_has_all_that_images_need(folders: Path, name: str) -> None:
    """Layers of ours in C, if there are any here, take rows of images as the model's own do."""
    with KVBoost.from_pretrained(folders / name, device="cpu", dtype="float32") as engine:
        expected = engine.generate(QUESTION, 6, "baseline").token_ids
        assert engine.generate(QUESTION, 6).token_ids == expected
        assert engine.generate(QUESTION, 6).token_ids == expected


def test_without_an_image_processor_images_are_refused(folders: Path, tmp_path: Path) -> None:
    for file in (folders / "smolvlm").iterdir():
        if file.name not in ("preprocessor_config.json", "processor_config.json"):
            (tmp_path / file.name).symlink_to(file)
    with KVBoost.from_pretrained(tmp_path, device="cpu") as engine:
        assert engine.generate("text", 1).token_ids
        with pytest.raises(ImageError, match="came without an image processor; give"):
            engine.generate(QUESTION, 1)


def test_without_pillow_images_are_refused(folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvboost.model.vision.loading.has_pillow", lambda: False)
    with (
        KVBoost.from_pretrained(folders / "smolvlm", device="cpu") as engine,
        pytest.raises(ImageError, match=r"images need Pillow; install it with: pip install"),
    ):
        engine.generate(QUESTION, 1)


def test_the_chat_template_of_a_processor_is_found(folders: Path, tmp_path: Path) -> None:
    for file in (folders / "smolvlm").iterdir():
        if file.name != "chat_template.jinja":
            (tmp_path / file.name).symlink_to(file)
    template = (
        "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}[{{ p.text }}]"
    )
    template += "{% else %}<image>{% endif %}{% endfor %}{% endfor %}"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    with KVBoost.from_pretrained(tmp_path, device="cpu") as engine:
        ids = engine.encode(QUESTION)
        assert engine.decode(ids[-15:]) == "[What is this?]"
        text = engine.encode([{"role": "user", "content": "Hello"}])
        assert engine.decode(text) == "[Hello]", "text is a part where the template wants parts"
