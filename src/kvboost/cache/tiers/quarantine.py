"""The last few files of a cache folder that were not what they said."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from kvboost.cache.tiers import files

MOST_QUARANTINED = 16


class Quarantine:
    """Not thread-safe: its tier locks. It counts what was there at first and what it has moved
    there itself."""

    def __init__(self, folder: Path, is_ours: Callable[[str], bool]) -> None:
        """``is_ours``: whether a file of this name is a chunk's."""
        self._folder = folder / "quarantine"
        self._is_ours = is_ours
        self._sizes: dict[str, int] = {}  # by name, the oldest first

    @property
    def nbytes(self) -> int:
        return sum(self._sizes.values())

    @property
    def is_link(self) -> bool:
        return os.path.islink(self._folder)

    def count(self) -> None:
        self._sizes = self.found()

    def found(self) -> dict[str, int]:
        """The names and sizes of the files that are there, other processes' included."""
        with suppress(OSError), files.real_folder(self._folder) as aside:
            return {n: size for n, size in files.sizes(aside).items() if self._is_ours(n)}
        return {}

    def take(self, path: Path) -> None:
        """Moves a file here. Raises ``OSError`` if that is not possible."""
        with (
            files.real_folder(path.parent) as shard,
            files.real_folder(self._folder, create=True) as aside,
        ):
            os.rename(path.name, path.name, src_dir_fd=shard, dst_dir_fd=aside)
            size = os.stat(path.name, dir_fd=aside, follow_symlinks=False).st_size
        self._sizes.pop(path.name, None)
        self._sizes[path.name] = size
        while len(self._sizes) > MOST_QUARANTINED:
            self.drop_oldest()

    def drop_oldest(self) -> bool:
        """Removes the file that came here first; False if there is none."""
        if not self._sizes:
            return False
        self._drop(next(iter(self._sizes)))
        return True

    def clear(self) -> None:
        """Removes all files, other processes' included."""
        for name in self.found():
            self._drop(name)
        self._sizes.clear()

    def _drop(self, name: str) -> None:
        with suppress(OSError), files.real_folder(self._folder) as aside:
            files.remove(name, aside)
        self._sizes.pop(name, None)
