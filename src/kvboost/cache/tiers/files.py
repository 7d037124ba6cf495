"""Files that are ours to touch: regular ones, in real folders, reached through no link.

Others may write into a shared folder. A link there must not lead a removal elsewhere, and a pipe
must not stop a reader.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def regular_size(path: Path) -> int | None:
    """The size of a regular file in a real folder; None if ``path`` is something else. Raises
    ``FileNotFoundError`` if it does not exist."""
    in_folder = stat.S_ISDIR(os.lstat(path.parent).st_mode)
    status = os.lstat(path)
    return status.st_size if in_folder and stat.S_ISREG(status.st_mode) else None


def is_blocked(path: Path) -> bool:
    """Whether something that is not ours is where ``path`` would be written."""
    try:
        return regular_size(path) is None
    except FileNotFoundError:
        return False
    except OSError:
        return True


@contextmanager
def open_regular(
    path: str | Path, folder: int | None = None
) -> Iterator[tuple[int, os.stat_result]]:
    """A descriptor for reading a regular file, and its status; ``path`` may be relative to the
    descriptor of a ``folder``. Never waits; raises ``OSError`` for anything else than a file, a
    link included."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, dir_fd=folder)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{path} is not a regular file")
        yield descriptor, status
    finally:
        os.close(descriptor)


@contextmanager
def real_folder(path: str | Path, *, create: bool = False) -> Iterator[int]:
    """A descriptor of a folder, for calls that take ``dir_fd``. Raises ``OSError`` for a link."""
    if create:
        with suppress(FileExistsError):
            os.mkdir(path, 0o700)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def remove(name: str, folder: int) -> None:
    """Removes a file from a folder; what is not a regular file stays. Raises ``OSError``."""
    if stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
        os.unlink(name, dir_fd=folder)


def sizes(folder: int, is_ours: Callable[[str], bool]) -> dict[str, int]:
    """The regular files of a folder whose names are ours, and their sizes."""
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_ours(entry.name) and entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):  # removed meanwhile
                    found[entry.name] = entry.stat(follow_symlinks=False).st_size
    return found
