from __future__ import annotations

import io

import pytest

from kvboost.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def show(monkeypatch):
    """What a progress of one step writes to standard error."""

    def show(stderr: io.StringIO, **options: bool) -> str:
        monkeypatch.setattr("sys.stderr", stderr)
        with Progress("reading", **options) as progress, progress.step("read", 2) as step:
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
