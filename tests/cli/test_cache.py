"""``kvboost cache`` on folders of a tiny model's chunks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvboost.cache.chunk import KVChunk, Origin
from kvboost.cache.tiers.disk import DiskTier
from kvboost.cli import app
from support.chunks import make_chunk
from support.tiny import byte_tokenizer

runner = CliRunner()
COMMANDS = ("ls", "info", "verify", "clear", "export", "import", "forget")
TEXT = "The keeper wrote down every ship that passed, and the hour, and the weather."


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("KVBOOST_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("KVBOOST_CACHE_DIR", raising=False)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with a tokenizer, and no weights."""
    byte_tokenizer().save_pretrained(tmp_path / "tiny-model")
    return str(tmp_path / "tiny-model")


def chunk_of(text: str, name: str) -> KVChunk:
    origin = Origin(f"of {name}", name)
    return make_chunk(byte_tokenizer()(text)["input_ids"], origin=origin)


def fill(path: Path, *chunks: KVChunk) -> str:
    tier = DiskTier(path, 10**9)
    assert all(tier.put(chunk) for chunk in chunks)
    return str(path)


@pytest.fixture
def folder(tmp_path: Path, model: str) -> str:
    return fill(tmp_path / "kv", chunk_of(TEXT, model), chunk_of("Nothing of note.", model))


def run(*arguments: str, **options: object):
    return runner.invoke(app, ["cache", *arguments], **options)


def parsed(*arguments: str):
    done = run(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_with_an_example(command: str) -> None:
    shown = run(command, "--help")
    assert shown.exit_code == 0
    assert f"kvboost cache {command}" in " ".join(shown.output.replace("│", " ").split())


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_is_not_there_is_said_in_one_line(command: str, tmp_path: Path) -> None:
    done = run(command, *NEEDED.get(command, []), "--dir", str(tmp_path / "nowhere"))
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ") and "Traceback" not in done.output
    if command != "import":
        assert "does not exist" in done.stderr and not (tmp_path / "nowhere").exists()


NEEDED = {"export": ["kv.tar"], "import": ["kv.tar"], "forget": ["some text"]}


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("given", [[], ["--dir"], ["--cache-dir"]], ids=["argument", "dir", "long"])
def test_a_folder_is_an_argument_or_an_option(
    command: str, given: list[str], tmp_path: Path
) -> None:
    """What is said about a folder that is none shows that it was taken for the folder."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    done = run(command, *NEEDED.get(command, []), *given, str(tmp_path / "mine"))
    assert done.exit_code == 2 and "mine' is not a cache folder" in done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_two_folders_are_a_mistake(command: str, folder: str, tmp_path: Path) -> None:
    other = str(tmp_path / "other")
    for pair in (
        [folder, "--dir", other],
        [folder, "--cache-dir", other],
        ["--dir", folder, "--cache-dir", other],
        ["--dir", folder, "--dir", other],
    ):
        done = run(command, *NEEDED.get(command, []), *pair)
        assert done.exit_code == 2
        line = done.stderr
        assert line.startswith(f"error: two folders are given, {folder!r} and {other!r}; name one")
        assert line.count("\n") == 1
    assert parsed("info", folder)["chunks"] == 2 and not Path(other).exists()
    assert parsed("info", folder, "--dir", folder, "--cache-dir", folder)["chunks"] == 2


def test_ls_lists_chunks_and_no_text(folder: str) -> None:
    listed = parsed("ls", "--dir", folder)
    assert {entry["tokens"] for entry in listed} == {len(TEXT), 16}
    assert all(entry["lineage"] == "exact" and entry["bits"] == 16 for entry in listed)
    shown = run("ls", "--dir", folder).stdout
    assert all(entry["key"][:12] in shown for entry in listed)
    assert "keeper" not in shown and "text" not in listed[0]
    assert "and 1 more" in run("ls", "--dir", folder, "--limit", "1").stdout
    assert "more" not in run("ls", "--dir", folder, "--limit", "0").stdout


def test_ls_shows_how_texts_begin_when_asked(folder: str) -> None:
    assert {entry["text"][:10] for entry in parsed("ls", "--dir", folder, "--text")} == {
        "The keeper",
        "Nothing of",
    }
    assert "The keeper wrote" in run("ls", "--dir", folder, "--text").stdout


def test_ls_shows_a_question_mark_where_no_tokenizer_is_here(tmp_path: Path) -> None:
    folder = fill(tmp_path / "kv", chunk_of(TEXT, "custom"))
    assert [entry["text"] for entry in parsed("ls", "--dir", folder, "--text")] == ["?"]


def test_what_a_file_says_cannot_drive_the_terminal(tmp_path: Path) -> None:
    folder = fill(tmp_path / "kv", chunk_of(TEXT, "\x1b[2J[red]x"))
    for command in ("ls", "info"):
        shown = run(command, "--dir", folder).stdout
        assert "\x1b" not in shown and "?[2J[red]x" in shown


def test_info_adds_up_in_units_people_write(folder: str, model: str) -> None:
    found = parsed("info", "--dir", folder)
    (one,) = found["models"]
    assert (one["name"], one["chunks"], one["tokens"]) == (model, 2, len(TEXT) + 16)
    assert found["bytes"] == sum(path.stat().st_size for path in Path(folder).rglob("*.safe*"))
    shown = run("info", "--dir", folder).stdout
    assert f"2 chunks, {len(TEXT) + 16} tokens" in shown and "KiB" in shown


def test_the_environment_names_the_folder(folder: str, monkeypatch) -> None:
    monkeypatch.setenv("KVBOOST_CACHE_DIR", folder)
    assert parsed("info")["folder"] == folder


def test_verify_ends_with_1_when_a_file_is_bad(folder: str) -> None:
    assert parsed("verify", "--dir", folder) == {
        "ok": 2,
        "bad": 0,
        "unreadable": 0,
        "signed": 0,
        "other_version": 0,
    }
    next(Path(folder).rglob("*.safetensors")).write_bytes(b"nonsense")
    done = run("verify", "--dir", folder)
    assert done.exit_code == 1
    assert "1 whole chunk\n" in done.stdout and "quarantine" in done.stdout
    assert parsed("info", "--dir", folder)["quarantine"]["files"] == 1


def test_clear_asks_first(folder: str) -> None:
    asked = run("clear", "--dir", folder, input="n\n")
    assert asked.exit_code == 1 and "Remove 2 chunks" in asked.output
    assert parsed("info", "--dir", folder)["chunks"] == 2
    assert run("clear", "--dir", folder, input="y\n").exit_code == 0
    assert parsed("info", "--dir", folder)["chunks"] == 0


def test_clear_removes_one_model(tmp_path: Path) -> None:
    folder = fill(tmp_path / "kv", chunk_of("mine", "mine"), chunk_of("yours", "yours"))
    assert parsed("clear", "--dir", folder, "--model", "mine", "--yes") == {"removed": 1}
    assert [one["name"] for one in parsed("info", "--dir", folder)["models"]] == ["yours"]


def test_a_cache_goes_to_another_machine(folder: str, tmp_path: Path) -> None:
    archive, there = str(tmp_path / "kv.tar"), str(tmp_path / "there")
    done = parsed("export", archive, "--dir", folder)
    assert (done["chunks"], done["bytes"]) == (2, Path(archive).stat().st_size)
    assert parsed("import", archive, "--dir", there)["installed"] == 2
    assert "2 already there" in run("import", archive, "--dir", there).stdout
    assert parsed("info", "--dir", there)["models"] == parsed("info", "--dir", folder)["models"]


def test_import_keeps_a_budget_people_write(folder: str, tmp_path: Path) -> None:
    archive, there = str(tmp_path / "kv.tar"), str(tmp_path / "there")
    run("export", archive, "--dir", folder)
    done = run("import", archive, "--dir", there, "--max-size", "1KiB")
    assert "2 left out: no room in 1KiB" in done.stdout
    wrong = run("import", archive, "--dir", there, "--max-size", "much")
    assert wrong.exit_code == 2 and "--max-size='much' is not a size" in wrong.stderr


@pytest.mark.parametrize("source", ["argument", "stdin"])
def test_forget_needs_the_tokenizer_alone(folder: str, source: str) -> None:
    given = TEXT if source == "argument" else "-"
    done = run("forget", given, "--dir", folder, "--json", input=TEXT)
    assert json.loads(done.stdout)["forgotten"] == 1
    assert [entry["tokens"] for entry in parsed("ls", "--dir", folder)] == [16]


def test_forget_says_whose_tokens_were_not_looked_for(tmp_path: Path, model: str) -> None:
    folder = fill(tmp_path / "kv", chunk_of(TEXT, model), chunk_of("another", "custom"))
    done = parsed("forget", TEXT, "--dir", folder, "--model", model)
    assert (done["forgotten"], done["other_models"]) == (1, ["custom"])


def test_forget_without_a_tokenizer_asks_for_one(tmp_path: Path) -> None:
    folder = fill(tmp_path / "kv", chunk_of(TEXT, "custom"))
    done = run("forget", TEXT, "--dir", folder)
    assert done.exit_code == 2 and "--model" in done.stderr
    assert parsed("info", "--dir", folder)["chunks"] == 1


def test_forgetting_nothing_is_a_mistake(folder: str) -> None:
    done = run("forget", " ", "--dir", folder)
    assert done.exit_code == 2 and "not blank" in done.stderr
