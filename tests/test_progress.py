"""Progress on a terminal, in a file, in a library call, and switched off."""

from __future__ import annotations

import io

import pytest

from kvboost import progress
from kvboost.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def show(monkeypatch):
    """What a progress of one step writes to standard error."""

    def show(stderr: io.StringIO, **options: bool) -> str:
        monkeypatch.setattr("sys.stderr", stderr)
        with Progress("reading", **options) as shown, shown.step("read", 2) as step:
            step.advance(2)
        return stderr.getvalue()

    monkeypatch.delenv("KVBOOST_PROGRESS", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    return show


def test_a_command_without_a_terminal_prints_plain_lines(show) -> None:
    assert show(io.StringIO()) == "reading\n  read ...\n"


def test_a_library_call_without_a_terminal_prints_nothing(show) -> None:
    assert show(io.StringIO(), only_on_terminal=True) == ""


def test_a_terminal_shows_title_and_bar(show) -> None:
    for library_call in (False, True):
        shown = show(Terminal(), only_on_terminal=library_call)
        assert "reading" in shown and "━" in shown


def test_progress_can_be_switched_off(show, monkeypatch) -> None:
    assert show(Terminal(), show=False) == ""
    monkeypatch.setenv("KVBOOST_PROGRESS", "0")
    assert show(Terminal()) == "" and show(io.StringIO()) == ""


def test_warm_prints_nothing_without_a_terminal(engine, capfd) -> None:
    engine.warm(["a document of some length", "another document"])
    assert capfd.readouterr().err == ""


def test_a_file_gets_the_title_the_steps_and_lines_now_and_then(capsys, monkeypatch) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with Progress("three rounds") as shown, shown.step("rounds", 3) as step:
        step.advance()
        step.advance(2)
    assert capsys.readouterr().err.splitlines() == [
        "three rounds",
        "  rounds ...",
        "  rounds: 1 of 3, 0:00",
        "  rounds: 3 of 3, 0:00",
    ]


def test_lines_are_not_printed_at_every_step(capsys) -> None:
    with Progress("many rounds") as shown, shown.step("rounds", 1000) as step:
        for _ in range(1000):
            step.advance()
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize(
    ("done", "total", "told"), [(3, 8, "3 of 8"), (5e8, 1e9, "50%"), (1, None, "")]
)
def test_large_totals_are_percents(done: float, total: float | None, told: str) -> None:
    assert progress._count(done, total) == told
