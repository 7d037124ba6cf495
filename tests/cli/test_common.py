from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvboost.cli import app
from kvboost.cli.common import errors, in_flags, unreadable, unwrap_help
from kvboost.errors import ConfigError


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("max_kv_bytes='x' is not a size", "--max-kv-bytes='x' is not a size"),
        ("kv_cache_bits=5 is not available", "--kv-bits=5 is not available"),
        ("the model has no layer=3", "the model has no layer=3"),
    ],
)
def test_an_error_names_the_option_as_it_was_typed(message, said, capsys) -> None:
    assert in_flags(message) == said
    with pytest.raises(typer.Exit), errors():
        raise ConfigError(message)
    assert capsys.readouterr().err.strip() == f"error: {said}"


def test_a_file_that_cannot_be_read_is_named_once_with_what_to_do() -> None:
    missing = FileNotFoundError(2, "No such file or directory", "keys.txt")
    error = unreadable("--api-keys", Path("keys.txt"), missing, "name a file")
    assert str(error) == (
        "--api-keys keys.txt cannot be read (No such file or directory); name a file"
    )


@pytest.mark.parametrize("command", ["chat", "generate"])
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--mode", "fast", "--mode='fast' is unknown; choose one of 'baseline'"),
        ("--exactness", "sure", "--exactness='sure' is not available"),
        ("--speculate", "often", "--speculate='often' is not available"),
        ("--speculate", "65", "--speculate=65 must be a number between 1 and 64"),
        ("--max-new-tokens", "0", "--max-new-tokens=0 must be a whole number of at least 1"),
    ],
)
def test_wrong_options_are_refused_before_a_model_is_loaded(
    command, option, value, said, monkeypatch
) -> None:
    monkeypatch.setattr("kvboost.cli.main.load_engine", None)
    arguments = [command, *(["hello"] if command == "generate" else []), option, value]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2 and said in done.stderr


def test_help_is_wrapped_by_the_terminal_alone() -> None:
    group = typer.Typer()
    inner = typer.Typer()
    group.add_typer(inner, name="inner")

    @inner.command()
    def command() -> None:
        """Does it.

        A sentence over
        two lines.

          kept as
          it is
        """

    unwrap_help(group)
    assert inner.registered_commands[0].help == (
        "Does it.\n\nA sentence over two lines.\n\n  kept as\n  it is"
    )


def test_no_command_shows_a_help_with_broken_lines() -> None:
    shown = CliRunner().invoke(app, ["chat", "--help"], env={"COLUMNS": "300"}, terminal_width=300)
    assert "With --cache-dir the next run reuses this conversation." in shown.output
