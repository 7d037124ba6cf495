from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from kvboost.cli import option_files
from kvboost.cli.option_files import MAX_BYTES, read_option_file
from kvboost.errors import ConfigError


def read(path: Path, *, starting: bool = False) -> str:
    return read_option_file("--api-keys", path, "name another", starting=starting)


def test_regular_files_and_links_to_them_are_read(tmp_path) -> None:
    file = tmp_path / "keys.txt"
    file.write_text("k-é\n" + "#" * (MAX_BYTES - 5))
    (tmp_path / "link").symlink_to(file)
    for path in (file, tmp_path / "link"):
        assert read(path).startswith("k-é\n") and read(path) == read(path, starting=True)


def test_what_cannot_be_a_file_of_options_is_refused(tmp_path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"#" * (MAX_BYTES + 1))
    (tmp_path / "binary").write_bytes(b"\xff")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        for name, reason in (
            ("gone", "No such file or directory"),
            (".", "it is not a regular file"),
            ("/dev/zero", "it is not a regular file"),
            ("socket", ""),
            ("pipe", "it is a pipe, and only a server that starts reads one"),
            ("large", "it has more than 1,048,576 bytes"),
            ("binary", "'utf-8' codec"),
        ):
            with pytest.raises(ConfigError, match=rf"--api-keys .*{reason}.*; name another$"):
                read(tmp_path / name)


def test_a_start_waits_for_a_pipe(tmp_path, monkeypatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_text("k-ann\n" * 20_000))
    writer.start()
    assert read(pipe, starting=True) == "k-ann\n" * 20_000
    writer.join()
    monkeypatch.setattr(option_files, "PIPE_SECONDS", 0.01)
    with pytest.raises(ConfigError, match="did not close this pipe within"):
        read(pipe, starting=True)
