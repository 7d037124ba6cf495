"""Files of JSON lines that users give, packed by gzip or not."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from kvboost.errors import ConfigError

T = TypeVar("T")


def read_rows(
    path: str | os.PathLike[str], parse: Callable[[int, Any], T], what: str, expected: str
) -> list[T]:
    """The results of ``parse``, which is given the number of each line, from 1, and its JSON. Blank
    lines are skipped. Raises ``ConfigError`` if the file cannot be read or holds no ``what``, and
    if ``parse`` raises ``ValueError``: it names the line and says what was ``expected``."""
    name = os.fspath(path)
    rows = []
    for number, line in enumerate(_lines(path, what, expected), start=1):
        if line.strip():
            try:
                rows.append(parse(number, _json(line)))
            except ValueError as error:
                raise ConfigError(f"{name}, line {number}: {error}; expected {expected}") from error
    if not rows:
        raise ConfigError(
            f"{name}, line 1: the file holds no {what}s; expected one {what} a line: {expected}"
        )
    return rows


def field_of(row: object, name: str) -> object:
    """Raises ``ValueError`` if there is none of that name."""
    if not isinstance(row, dict):
        raise ValueError(f"{row!r:.80} is not an object with {name!r}")
    if name not in row:
        raise ValueError(f"{name!r} is missing")
    return row[name]


def _lines(path: str | os.PathLike[str], what: str, expected: str) -> Iterator[bytes]:
    name = Path(path).expanduser()
    number = 0
    try:
        with gzip.open(name) if name.suffix == ".gz" else name.open("rb") as file:
            for line in file:
                number += 1
                yield line
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ConfigError(
            f"{os.fspath(path)} cannot be unpacked after line {number} ({error}); "
            "give a whole file that gzip made, or one that does not end in .gz"
        ) from error
    except OSError as error:
        raise ConfigError(
            f"{os.fspath(path)} cannot be read ({error.strerror}); "
            f"give a file with one {what} a line: {expected}"
        ) from error


def _json(line: bytes) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason})") from error
