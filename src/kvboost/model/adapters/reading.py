"""Reading the files of an adapter: regular files of a bounded size, and how a refusal is said.

Whoever names the folder of an adapter may not be the one who wrote it. Nothing there may make a
reader wait, take much memory, or run code.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from kvboost.errors import AdapterError

LONGEST_SHOWN = 100
BYTES_PER_VALUE = 24
"""A JSON file of a certain size holds no more lists and objects than one for so many bytes. Many
small ones take seconds to read, during which no other thread runs."""


def refuse(path: Path, reason: str) -> AdapterError:
    return AdapterError(f"the adapter in {shown(str(path), 1000)} cannot be served: {reason}")


def shown(value: object, longest: int = LONGEST_SHOWN) -> str:
    """A value for a message: one short line, whatever it is."""
    text = value if isinstance(value, str) else repr(value)
    text = "".join(char if char.isprintable() else "?" for char in text[: longest + 1])
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


@contextmanager
def opened(folder: Path, name: str) -> Iterator[tuple[BinaryIO, int]]:
    """A file of an adapter and its size. A link may lead to it, as in the cache of the hub. Raises
    AdapterError if it cannot be read or is anything else than a file."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
    try:
        with open(os.open(folder / name, flags), "rb", buffering=0) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise refuse(folder, f"{name} is not a regular file")
            yield file, status.st_size
    except OSError as error:
        raise refuse(folder, f"{name} cannot be read: {error.strerror or error}") from None


def read(file: BinaryIO, num_bytes: int) -> bytes:
    """So many bytes, or fewer at the end of the file."""
    pieces: list[bytes] = []
    while num_bytes and (piece := file.read(num_bytes)):
        pieces.append(piece)
        num_bytes -= len(piece)
    return b"".join(pieces)


def parse(folder: Path, name: str, data: bytes) -> Any:
    """The JSON in ``data``."""
    if data.count(b"[") + data.count(b"{") > 64 + len(data) // BYTES_PER_VALUE:
        raise refuse(folder, f"{name} has too many lists and objects for its size")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise refuse(folder, f"{name} is not JSON: {shown(str(error))}") from None
