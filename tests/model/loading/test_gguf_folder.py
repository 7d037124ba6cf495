"""The folder with the config and tokenizer of a GGUF file."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvboost import CacheFolderError
from kvboost.model.loading import gguf_folder, load
from kvboost.model.loading.gguf import GgufIndex, check_gguf
from kvboost.model.loading.gguf_folder import described_folder
from support.tiny import tiny_model
from support.tiny_gguf import write_gguf


@pytest.fixture
def described(monkeypatch, tmp_path) -> list[Path]:
    """Which files transformers would have been asked about."""
    seen: list[Path] = []

    def describe(index: GgufIndex, folder: Path) -> None:
        seen.append(index.path)
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(gguf_folder, "_describe", describe)
    return seen


def test_a_file_is_described_once_wherever_it_is(described, tmp_path) -> None:
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    write_gguf(tiny_model("llama").cpu(), first)
    second.write_bytes(first.read_bytes())
    folder = described_folder(check_gguf(first))
    assert described_folder(check_gguf(second)) == folder
    assert described == [first] and (folder / "config.json").is_file()
    other = tmp_path / "other.gguf"
    write_gguf(tiny_model("qwen2").cpu(), other)
    assert described_folder(check_gguf(other)) != folder


def test_a_tokenizer_alone_is_read_from_the_folder(described, monkeypatch, tmp_path) -> None:
    """From the file, transformers takes up to a minute, every time."""
    file = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama").cpu(), file)
    asked: list[Path] = []
    monkeypatch.setattr(load.AutoTokenizer, "from_pretrained", asked.append)
    monkeypatch.setattr(load, "ModelTokenizer", lambda tokenizer: tokenizer)
    for _ in range(2):
        load.load_tokenizer(file)
    assert asked == [described_folder(check_gguf(file))] * 2 and described == [file]


def test_an_interrupted_description_leaves_nothing(described, monkeypatch, tmp_path) -> None:
    file = tmp_path / "model.gguf"
    write_gguf(tiny_model("llama").cpu(), file)

    def interrupted(index: GgufIndex, folder: Path) -> None:
        folder.mkdir()
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf_folder, "_describe", interrupted)
        with pytest.raises(KeyboardInterrupt):
            described_folder(check_gguf(file))
    assert described_folder(check_gguf(file)).is_dir() and described == [file]


def test_a_cache_folder_that_cannot_be_written_names_the_remedy(
    described, monkeypatch, tmp_path
) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    monkeypatch.setenv("KVBOOST_HOME", str(in_the_way))
    write_gguf(tiny_model("llama").cpu(), tmp_path / "model.gguf")
    with pytest.raises(CacheFolderError, match=r"cannot be written.*KVBOOST_HOME"):
        described_folder(check_gguf(tmp_path / "model.gguf"))
