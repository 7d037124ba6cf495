"""Signals to ``kvboost serve``, sent to a real process: while it loads, serves and stops."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.tiny import save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


class Serving:
    """The process, from its start; its standard error is read line by line."""

    def __init__(self, model: Path, keys: Path) -> None:
        command = [sys.executable, "-m", "kvboost", "serve", "--port", "0", "-m", str(model)]
        self.process = subprocess.Popen(
            [*command, "--api-keys", str(keys)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "COLUMNS": "200"},
        )

    def said(self, text: str) -> str:
        """Waits for a line with ``text``."""
        lines = []
        assert self.process.stderr is not None
        for line in self.process.stderr:
            lines.append(line)
            if text in line:
                return line
        raise AssertionError("".join(lines))

    def end(self, number: int) -> tuple[int, str]:
        """Its exit code after this signal, and what it still wrote to standard error."""
        self.process.send_signal(number)
        errors = self.process.communicate(timeout=120)[1]
        return self.process.returncode, errors


@pytest.fixture
def keys(tmp_path) -> Path:
    file = tmp_path / "keys.txt"
    file.write_text("ann:k-ann\n")
    return file


@pytest.fixture
def serving(model, keys) -> Iterator[Serving]:
    started = Serving(model, keys)
    started.said("loading")
    yield started
    started.process.kill()
    started.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_loading_can_be_stopped(serving, number) -> None:
    assert serving.end(number) == (128 + number, "stopped while the model was loading\n")


def test_reloads_end_neither_the_loading_nor_the_serving(serving, keys) -> None:
    serving.process.send_signal(signal.SIGHUP)
    serving.said("SIGHUP: the files are read again as soon as the server listens")
    keys.write_text("bob:k-bob\n")
    serving.said("reload: changed keys")

    keys.unlink()
    os.mkfifo(keys)  # nobody ever writes to it
    serving.process.send_signal(signal.SIGHUP)
    assert "keys.txt cannot be read (it is a pipe" in serving.said("nothing was changed")
    address = serving.process.stdout.readline().strip().removesuffix("/v1")
    assert urllib.request.urlopen(f"{address}/health", timeout=60).status == 200

    code, errors = serving.end(signal.SIGTERM)
    assert code == 0 and "stopped\n" in errors
    assert "nanobind" not in errors  # triton's library complains of objects that nothing has freed
