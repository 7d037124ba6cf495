"""Chunks in a folder that any number of processes share.

One file per chunk, named after its key, in one of 256 folders; there is no other index. A file is
written under a temporary name, flushed and renamed, by one process at a time (the one that holds
the lock file). So a temporary file that exists while no process holds the lock belongs to a dead
process and is removed. Reading takes no lock. A file that is not a whole chunk counts as a miss and
goes into quarantine. A chunk of another version of KVBoost is not read and stays until its room is
needed::

    ab/ab12….safetensors     a chunk
    quarantine/              the last few files that were not what they said
    tmp-…                    a file that is being written
    .lock  CACHEDIR.TAG

Only regular files with these names are touched. Links, pipes and the like are passed over.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import torch
from filelock import FileLock, Timeout

from kvboost.cache import codec
from kvboost.cache.chunk import ChunkInfo, KVChunk
from kvboost.cache.secret import Secret
from kvboost.cache.tiers import files
from kvboost.cache.tiers.disk_contents import Contents, Other, Shard
from kvboost.cache.tiers.disk_folder import add_tag, make_folder
from kvboost.cache.tiers.disk_scan import (
    SUFFIX,
    Headers,
    is_chunk_name,
    names_in,
    read_headers,
    read_info,
)
from kvboost.cache.tiers.quarantine import Quarantine
from kvboost.tokens.hashing import ChunkKey

LOCK_SECONDS = 10.0
"""The most seconds that a write waits for other processes that write."""
REFRESH_SECONDS = 0.05
"""The seconds between looks for other processes' chunks. Longer than a tick of a file system's
clock."""

log = logging.getLogger("kvboost")


@dataclass(frozen=True)
class Changes:
    """The changes of the folder since the last look. ``added`` begins with the chunk that was used
    longest ago."""

    added: tuple[ChunkInfo, ...] = ()
    gone: tuple[ChunkKey, ...] = ()


class DiskTier:
    """Thread-safe. Its quick calls, such as ``contains`` and ``nbytes``, never wait for one that
    touches files. Raises ``CacheFolderError`` when the folder can be neither made nor read, and
    nothing afterwards. ``allocate`` decides in which memory chunks are read. With a ``secret``,
    chunks are signed, and a file that is not signed with it counts as damaged."""

    name = "disk"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int,
        *,
        allocate: codec.Allocate = torch.empty_like,
        secret: Secret | None = None,
    ) -> None:
        self.folder = Path(folder).expanduser()
        self.max_bytes = max_bytes
        self._allocate = allocate
        self._secret = secret
        self._contents = Contents()
        self._quarantine = Quarantine(self.folder, is_chunk_name)
        self._passed_over: set[str] = set()  # names that we leave alone from now on
        self._said_other = False
        self._deleting: Counter[ChunkKey] = Counter()
        self._deleted: set[ChunkKey] = set()  # since the look that is under way began
        self._root = Shard()
        self._refreshed = float("-inf")
        self._faults: Counter[str] = Counter()
        self._looking = threading.Lock()  # one thread looks at a time
        self._guard = threading.RLock()  # guards what the tier knows; held for moments
        self._lock = FileLock(self.folder / ".lock", timeout=LOCK_SECONDS, mode=0o600)
        self._prepare()

    @property
    def nbytes(self) -> int:
        with self._guard:
            return self._contents.nbytes + self._quarantine.nbytes

    @property
    def faults(self) -> dict[str, int]:
        with self._guard:
            return dict(self._faults)

    def refresh(self, *, now: bool = False) -> Changes:
        """Looks at what processes have written or removed since the last call. Costs one ``stat``
        when nothing has changed; nothing at all, unless ``now``, when it is called again at once or
        while another thread looks."""
        if not self._looking.acquire(blocking=now):
            return Changes()
        try:
            if not now and time.monotonic() < self._refreshed + REFRESH_SECONDS:
                return Changes()
            self._refreshed = time.monotonic()
            with self._guard:
                self._deleted.clear()
            return self._look()
        finally:
            self._looking.release()

    def _look(self) -> Changes:
        added: list[tuple[int, ChunkInfo]] = []
        gone: list[ChunkKey] = []
        shards = self._contents.shards
        try:
            if self._root.is_as_before(self.folder.stat().st_mtime_ns):
                return Changes()
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    if entry.name not in shards:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        self._look_into(entry, added, gone)
                    else:
                        self._pass_over(entry.name)
            self._root.settled &= all(shard.settled for shard in shards.values() if shard.changed)
        except OSError:
            self._root.settled = False  # it is looked at again
            self._fault("unreadable")
        self._say_other()
        added.sort(key=lambda found: found[0])
        return Changes(tuple(info for _, info in added), tuple(gone))

    def get(self, key: ChunkKey, expected: codec.Expected | None = None) -> KVChunk | None:
        """The chunk, if it is whole and what was ``expected``. Otherwise its file goes into
        quarantine. A file that this process has removed meanwhile is a miss and no fault."""
        path = self._path(key)
        try:
            if (size := files.regular_size(path)) is None:
                self._note(key, None)
                self._pass_over(key)
                return None
            most = None if expected is None else expected.most_bytes
            if most is not None and size > most:
                raise codec.BadChunk(f"{size} bytes, more than such a chunk can have")
            chunk = codec.read_file(path, self._allocate, self._secret, expected)
            if chunk.key != key:
                raise codec.BadChunk("it is another chunk")
        except FileNotFoundError:
            with self._guard:
                if self.contains(key) and key not in self._deleting:
                    self._miss(key, "vanished")
            return None
        except codec.OtherVersion:
            with suppress(OSError):
                self._add_other(key, os.lstat(path))
            return None
        except codec.BadChunk:
            self._set_aside([key])
            return None
        except Exception:  # such as no memory, no file handles: the file may be fine
            self._miss(key, "unreadable")
            return None
        with suppress(OSError):  # the next start takes this for the time of its last use
            os.utime(path, follow_symlinks=False)
        return chunk

    def put(self, chunk: KVChunk) -> bool:
        data = codec.encode(chunk, self._secret)
        with self.exclusive() as locked:
            if not locked:
                return False
            if self.contains(chunk.key) and self._path(chunk.key).exists():
                return True
            self.drop_unread(len(data))
            if self.nbytes + len(data) > self.max_bytes:
                return False
            return self._write(chunk.key, data)

    def room_for(self, chunk: KVChunk) -> int:
        """The most bytes that a chunk takes here."""
        return chunk.nbytes + 8 * chunk.info.num_tokens + codec.HEADER_BYTES

    def is_blocked(self, key: ChunkKey) -> bool:
        """Whether ``key`` cannot be written because something that is not ours has its name."""
        with self._guard:
            is_other = self._contents.is_other(key)
        return is_other or files.is_blocked(self._path(key))

    @contextmanager
    def exclusive(self) -> Iterator[bool]:
        """No other process or thread writes meanwhile; false if the lock cannot be acquired. A
        thread that holds it may enter again."""
        try:
            self._lock.acquire()
        except (OSError, Timeout, NotImplementedError) as error:  # the last: no locks there
            self._fault("locked" if isinstance(error, Timeout) else "unwritable")
            yield False
            return
        try:
            yield True
        finally:
            self._lock.release()

    def delete(self, key: ChunkKey) -> None:
        with self._guard:
            self._deleting[key] += 1
        try:
            with files.real_folder(self._path(key).parent) as shard:
                files.remove(f"{key}{SUFFIX}", shard)
        except FileNotFoundError:
            self._note(key, None)
        except OSError:
            self._fault("undeleted")
        else:
            self._note(key, None)
        finally:
            with self._guard:
                self._deleting -= Counter([key])
                self._deleted.add(key)

    def contains(self, key: ChunkKey) -> bool:
        with self._guard:
            return key in self._contents

    def keys(self) -> list[ChunkKey]:
        with self._guard:
            return list(self._contents)

    def info(self, key: ChunkKey) -> ChunkInfo | None:
        """The present header of ``key``; None if it cannot be read."""
        try:
            with files.real_folder(self._path(key).parent) as folder:
                return read_info(key, folder, self._secret)
        except (OSError, codec.BadChunk):
            return None

    def quarantined(self) -> dict[str, int]:
        """The names and sizes of the files in quarantine, other processes' included."""
        return self._quarantine.found()

    def clear_quarantine(self) -> None:
        """Removes the files in quarantine, other processes' included."""
        self._quarantine.clear()

    def others(self) -> dict[ChunkKey, int]:
        """The chunks that another version of KVBoost wrote and their sizes, the one used longest
        ago first."""
        with self._guard:
            found = self._contents.others
        return {key: found[key].size for key in sorted(found, key=found.__getitem__)}

    def close(self) -> None:
        """Files stay."""

    def _prepare(self) -> None:
        make_folder(self.folder)
        with self.exclusive() as locked:
            if locked:
                self._remove_leftovers()
                add_tag(self.folder)
        if self._quarantine.is_link:
            self._pass_over("quarantine")
        self._quarantine.count()

    def _remove_leftovers(self) -> None:
        """No process writes now: temporary files are those of dead ones."""
        with (
            suppress(OSError),
            files.real_folder(self.folder.resolve()) as folder,
            os.scandir(folder) as entries,
        ):
            for entry in entries:
                if entry.name.startswith("tmp-") and entry.is_file(follow_symlinks=False):
                    with suppress(OSError):
                        os.unlink(entry.name, dir_fd=folder)
                        self._faults["leftover"] += 1

    def _look_into(
        self, entry: os.DirEntry[str], added: list[tuple[int, ChunkInfo]], gone: list[ChunkKey]
    ) -> None:
        """Looks at one of the folders."""
        shard = self._contents.shards[entry.name]
        try:
            if shard.is_as_before(entry.stat(follow_symlinks=False).st_mtime_ns):
                return
            with self._guard:  # before the look: what other threads write meanwhile is not gone
                known = {*shard.sizes, *shard.others}
            there, foreign = names_in(entry)
            new = there - known - self._passed_over
            headers = read_headers(entry.path, new, self._secret) if new else Headers()
        except OSError:
            shard.changed = 0
            self._root.settled = False  # it is looked at again
            self._fault("unreadable")
            return
        for key in foreign:
            self._pass_over(key)
        with self._guard:
            for info, status in headers.chunks:
                if info.key not in self._deleted:
                    self._note(info.key, status.st_size)
                    added.append((status.st_mtime_ns, info))
            for key, status in headers.others:
                self._add_other(key, status)
            if headers.unreadable:
                shard.settled = False  # they are tried again
                self._faults["unreadable"] += headers.unreadable
            for key in known - there:
                gone += [key] if key in shard.sizes else []
                self._note(key, None)
        self._set_aside(headers.damaged)

    def _write(self, key: ChunkKey, data: bytes) -> bool:
        temporary = self.folder / f"tmp-{os.getpid()}-{uuid4().hex}"
        path = self._path(key)
        try:
            with files.real_folder(path.parent, create=True) as shard:
                if self.is_blocked(key):
                    raise FileExistsError(f"{path} is not ours")
                with open(temporary, "xb", buffering=0) as file:
                    view = memoryview(data)
                    while view:
                        view = view[file.write(view) :]
                    os.fsync(file.fileno())
                os.rename(temporary, path.name, dst_dir_fd=shard)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._fault(_kind(error))
            return False
        with self._guard:
            self._passed_over.discard(key)
            self._note(key, len(data))
        return True

    def _set_aside(self, keys: Sequence[ChunkKey]) -> None:
        """Moves files of one folder that are not whole chunks aside. Where that is not possible,
        they are passed over from now on."""
        if not keys:
            return
        for key in keys:
            self._miss(key, "corrupt")
        names = [f"{key}{SUFFIX}" for key in keys]
        left = self._quarantine.take(self._path(keys[0]).parent, names)
        with self._guard:
            self._passed_over.update(name.removesuffix(SUFFIX) for name in left)

    def drop_unread(self, nbytes: int) -> None:
        """Removes files that nobody here reads while ``nbytes`` do not fit: those in quarantine,
        then other versions' chunks. The oldest go first."""
        while self.nbytes + nbytes > self.max_bytes and self._quarantine.drop_oldest():
            pass
        if self.nbytes + nbytes > self.max_bytes:
            self.remove_others(nbytes)

    def remove_others(self, nbytes: int | None = None) -> None:
        """Removes other versions' chunks, the oldest first: all, or until ``nbytes`` fit."""
        for key in self.others():
            if nbytes is not None and self.nbytes + nbytes <= self.max_bytes:
                break
            self.delete(key)

    def _pass_over(self, name: str) -> None:
        """``name``, a key or the name of a folder, is not a file or folder of ours."""
        with self._guard:
            if name not in self._passed_over:
                self._passed_over.add(name)
                self._fault("foreign")

    def _miss(self, key: ChunkKey, fault: str) -> None:
        self._note(key, None)
        self._fault(fault)

    def _note(self, key: ChunkKey, size: int | None) -> None:
        """``key`` takes ``size`` bytes, or does not exist."""
        with self._guard:
            if size is None:
                self._contents.remove(key)
            else:
                self._contents.add(key, size)

    def _add_other(self, key: ChunkKey, status: os.stat_result) -> None:
        """Another version wrote ``key``."""
        with self._guard:
            self._contents.add_other(key, Other(status.st_mtime_ns, status.st_size))
            self._fault("version")

    def _say_other(self) -> None:
        """Says once that there are chunks of another version."""
        with self._guard:
            count = len(self._contents.others)
            if not count or self._said_other:
                return
            self._said_other = True
        log.warning(
            "%d chunks in %s were written by another version of KVBoost. They are not used, and "
            "stay until their room is needed; `kvboost cache clear` removes them.",
            count,
            self.folder,
        )

    def _fault(self, name: str) -> None:
        with self._guard:
            self._faults[name] += 1

    def _path(self, key: ChunkKey) -> Path:
        return self.folder / key[:2] / f"{key}{SUFFIX}"


def _kind(error: OSError) -> str:
    """The counter of a failed write."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "full"
    return "unwritable"
