"""The last few files of a cache folder that were not what they said."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from kvboost.cache.tiers import files

MOST_QUARANTINED = 16


class Quarantine:
    """Thread-safe. It counts what was there at first and what it has moved there itself."""

    def __init__(self, folder: Path, is_ours: Callable[[str], bool]) -> None:
        """``is_ours``: whether a file of this name is a chunk's."""
        self._folder = folder / "quarantine"
        self._is_ours = is_ours
        self._sizes: dict[str, int] = {}  # by name, the oldest first
        self.nbytes = 0
        self._lock = threading.RLock()  # held while files are moved; `nbytes` needs no lock

    @property
    def is_link(self) -> bool:
        return os.path.islink(self._folder)

    def count(self) -> None:
        """Counts what is there, and removes more than a few."""
        with self._lock:
            self._sizes = self.found()
            self.nbytes = sum(self._sizes.values())
            self._drop(list(self._sizes)[:-MOST_QUARANTINED])

    def found(self) -> dict[str, int]:
        """The names and sizes of the files that are there, other processes' included."""
        with suppress(OSError), files.real_folder(self._folder) as aside:
            return files.sizes(aside, self._is_ours)
        return {}

    def take(self, folder: Path, names: Sequence[str]) -> list[str]:
        """Moves files of ``folder`` here; of very many, only the last few, and removes the others.
        Returns those that could not be moved."""
        left: list[str] = []
        try:
            with (
                self._lock,
                files.real_folder(folder) as shard,
                files.real_folder(self._folder, create=True) as aside,
            ):
                for name in names[:-MOST_QUARANTINED]:
                    with _noted(name, left):
                        files.remove(name, shard)
                for name in names[-MOST_QUARANTINED:]:
                    with _noted(name, left):
                        os.rename(name, name, src_dir_fd=shard, dst_dir_fd=aside)
                        size = os.stat(name, dir_fd=aside, follow_symlinks=False).st_size
                        self.nbytes += size - self._sizes.pop(name, 0)
                        self._sizes[name] = size
                self._drop(list(self._sizes)[:-MOST_QUARANTINED])
        except OSError:  # there is no such folder, or a link has its name
            return list(names)
        return left

    def drop_oldest(self) -> bool:
        """Removes the file that came here first; False if there is none."""
        with self._lock:
            oldest = next(iter(self._sizes), None)
            self._drop([] if oldest is None else [oldest])
        return oldest is not None

    def clear(self) -> None:
        """Removes all files, other processes' included."""
        with self._lock:
            self._drop(list(self.found()))
            self._sizes.clear()
            self.nbytes = 0

    def _drop(self, names: Sequence[str]) -> None:
        if not names:
            return
        with suppress(OSError), files.real_folder(self._folder) as aside:
            for name in names:
                with suppress(OSError):
                    files.remove(name, aside)
        for name in names:
            self.nbytes -= self._sizes.pop(name, 0)


@contextmanager
def _noted(name: str, left: list[str]) -> Iterator[None]:
    """Adds ``name`` to ``left`` if it cannot be moved. Another process may be faster."""
    try:
        yield
    except FileNotFoundError:
        pass
    except OSError:
        left.append(name)
