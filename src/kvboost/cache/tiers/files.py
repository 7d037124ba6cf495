"""Files that are ours to touch: regular ones, in real folders, reached through no link.

Others may write into a shared folder. A link there must not lead a removal elsewhere, and a pipe
must not stop a reader.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def is_regular(path: Path) -> bool:
    """Whether ``path`` is a regular file in a real folder. Raises ``FileNotFoundError`` if it does
    not exist."""
    in_folder = stat.S_ISDIR(os.lstat(path.parent).st_mode)
    return in_folder and stat.S_ISREG(os.lstat(path).st_mode)


def is_blocked(path: Path) -> bool:
    """Whether something that is not ours is where ``path`` would be written."""
    try:
        return not is_regular(path)
    except FileNotFoundError:
        return False
    except OSError:
        return True


def open_regular(path: Path) -> int:
    """A descriptor for reading a regular file. Never waits; raises ``OSError`` for anything else
    than a file, a link included."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file")
    return descriptor


@contextmanager
def real_folder(path: Path, *, create: bool = False) -> Iterator[int]:
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


def sizes(folder: int) -> dict[str, int]:
    """The regular files of a folder and their sizes."""
    found = {}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):  # removed meanwhile
                    found[entry.name] = entry.stat(follow_symlinks=False).st_size
    return found
