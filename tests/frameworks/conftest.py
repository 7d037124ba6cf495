"""Frameworks, unchanged, against a real server with a real model.

These tests need an environment with the frameworks, which has no torch and no KVBoost;
``make test-frameworks`` makes one and runs them there. The server runs in the project's own.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import pytest

from server_process import ServerProcess

collect_ignore_glob = [] if os.environ.get("KVBOOST_TEST_FRAMEWORKS") else ["test_*.py"]

MODEL = os.environ.get("KVBOOST_FRAMEWORKS_MODEL", "smollm2-135m")
ran: dict[tuple[str, str], list[str]] = {}
"""What was run, by the package and its version."""


@dataclass(frozen=True)
class Server:
    """A server that listens at ``root``; OpenAI's API is at ``url``."""

    root: str
    url: str
    model: str = MODEL


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    source = str(Path(__file__).parents[2] / "src")
    python = os.environ["KVBOOST_SERVER_PYTHON"]
    arguments = ("--model", MODEL, "--served-name", MODEL)
    with ServerProcess(
        *arguments, folder=folder, python=python, start_seconds=600.0, PYTHONPATH=source
    ) as process:
        yield Server(process.root, process.url)


@pytest.fixture
def has_run() -> Callable[[str, str], None]:
    """Notes for the table what a test has run to its end."""

    def note(package: str, what: str) -> None:
        ran.setdefault((package, version(package)), []).append(what)

    return note


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the table of docs/frameworks.md."""
    lines = ["| package | version | run against `kvboost serve` |", "| --- | --- | --- |"]
    lines += [
        f"| {name} | {number} | {'; '.join(ran[name, number])} |" for name, number in sorted(ran)
    ]
    terminalreporter.write_line(f"\nmodel: {MODEL}\n" + "\n".join(lines))
