"""Reads the files that options name, and never waits long for one."""

from __future__ import annotations

import os
import select
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvboost.cli.common import unreadable
from kvboost.errors import ConfigError

MAX_BYTES = 1024**2
PIPE_SECONDS = 10.0


def read_option_file(option: str, path: Path, remedy: str, *, starting: bool = False) -> str:
    """The text of the file that ``option`` names: a regular file, or a link to one, of at most
    1 MiB. A command that is ``starting`` also takes a pipe, such as ``<(...)`` of a shell, if the
    other side closes it within 10 s; a running server waits for nobody. Raises ConfigError, which
    ends with ``remedy``."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            return _read(descriptor, starting).decode()
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise unreadable(option, path, error, remedy) from None


def _read(descriptor: int, takes_pipes: bool) -> bytes:
    mode = os.fstat(descriptor).st_mode
    is_pipe = stat.S_ISFIFO(mode)
    if is_pipe and not takes_pipes:
        raise ValueError("it is a pipe, and only a server that starts reads one")
    if not (is_pipe or stat.S_ISREG(mode)):
        raise ValueError("it is not a regular file")
    end = time.monotonic() + PIPE_SECONDS
    data = b""
    while len(data) <= MAX_BYTES:
        # A pipe that nobody has written to yet would look as if it had ended.
        if is_pipe and not select.select([descriptor], [], [], max(0.0, end - time.monotonic()))[0]:
            raise ValueError(f"the other side did not close this pipe within {PIPE_SECONDS:.0f} s")
        piece = os.read(descriptor, MAX_BYTES)
        if not piece:
            return data
        data += piece
    raise ValueError(f"it has more than {MAX_BYTES:,} bytes")


def read_texts(
    paths: Sequence[Path], max_bytes: int
) -> tuple[tuple[tuple[str, str], ...], list[str]]:
    """The names and texts of files, and of all files in folders, in the order of their names; and
    the names of files in folders that are left out because they are empty or not UTF-8. Hidden
    files are not looked at. Raises ConfigError if there is nothing to read, or more than
    ``max_bytes``."""
    texts: list[tuple[str, str]] = []
    left_out: list[str] = []
    size = 0
    for path in paths:
        if not path.exists():
            raise ConfigError(f"--warm {path}: there is no such file or folder")
        for file in _files(path) if path.is_dir() else [path]:
            try:
                text = file.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError:
                text = ""
            except OSError as error:
                raise ConfigError(f"--warm {file} cannot be read: {error.strerror}") from None
            if text:
                size += len(text.encode())
                texts.append((str(file), text))
            elif path.is_dir():
                left_out.append(str(file))
            else:
                raise ConfigError(f"--warm {file} is empty or not UTF-8 text")
    if paths and not texts:
        raise ConfigError(f"--warm {paths[0]} holds no text file")
    if size > max_bytes:
        said = f"the files of --warm have {size:,} bytes; a server takes {max_bytes:,}: warm fewer"
        raise ConfigError(said)
    return tuple(texts), left_out


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            yield path
