"""Chunks in a folder that any number of processes share.

One file per chunk, named after its key, in one of 256 folders; there is no other index. A file is
written under a temporary name, flushed and renamed, by one process at a time (the one that holds
the lock file). So a temporary file that exists while no process holds the lock belongs to a dead
process and is removed. Reading takes no lock. A file that is not a whole chunk counts as a miss and
goes into quarantine::

    ab/ab12….safetensors     a chunk
    quarantine/              the last few files that were not what they said
    tmp-…                    a file that is being written
    .lock  CACHEDIR.TAG

Only regular files with these names are touched. Links, pipes and the like are passed over.
"""

from __future__ import annotations

import errno
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import torch
from filelock import FileLock, Timeout

from kvboost.cache import codec
from kvboost.cache.chunk import ChunkInfo, KVChunk
from kvboost.cache.secret import Secret
from kvboost.cache.tiers import files
from kvboost.cache.tiers.disk_folder import add_tag, make_folder
from kvboost.cache.tiers.quarantine import Quarantine
from kvboost.tokens.hashing import ChunkKey

SUFFIX = ".safetensors"
LOCK_SECONDS = 10.0
"""How long a write waits for other processes that write."""
REFRESH_SECONDS = 0.05
"""How often we look for other processes' chunks. Longer than a tick of a file system's clock."""

_NAME = re.compile(rf"[0-9a-f]{{32}}{re.escape(SUFFIX)}")


@dataclass(frozen=True)
class Changes:
    """How the folder changed since the last look. ``added`` begins with the chunk that was used
    longest ago."""

    added: tuple[ChunkInfo, ...] = ()
    gone: tuple[ChunkKey, ...] = ()


@dataclass
class _Shard:
    """One of the folders: when it had changed at the last look, and what it held."""

    changed: int = 0
    settled: bool = False
    """Whether a second look has found no change: a file may be added within the same tick of the
    clock that shows changes."""
    sizes: dict[ChunkKey, int] = field(default_factory=dict)


class DiskTier:
    """Thread-safe. Raises ``CacheFolderError`` when the folder can be neither made nor read, and
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
        self._shards = {f"{number:02x}": _Shard() for number in range(256)}
        self._nbytes = 0
        self._quarantine = Quarantine(self.folder, lambda name: _NAME.fullmatch(name) is not None)
        self._passed_over: set[str] = set()  # names that we leave alone from now on
        self._deleting: Counter[ChunkKey] = Counter()
        self._root = _Shard()
        self._refreshed = float("-inf")
        self._faults: Counter[str] = Counter()
        self._guard = threading.RLock()
        self._lock = FileLock(self.folder / ".lock", timeout=LOCK_SECONDS, mode=0o600)
        self._prepare()

    @property
    def nbytes(self) -> int:
        with self._guard:
            return self._nbytes + self._quarantine.nbytes

    @property
    def faults(self) -> dict[str, int]:
        with self._guard:
            return dict(self._faults)

    def refresh(self, *, now: bool = False) -> Changes:
        """Looks at what processes have written or removed since the last call. Costs one ``stat``
        when nothing has changed; called again at once, nothing at all, unless ``now``."""
        added: list[tuple[int, ChunkInfo]] = []
        gone: list[ChunkKey] = []
        with self._guard:
            if not now and time.monotonic() < self._refreshed + REFRESH_SECONDS:
                return Changes()
            self._refreshed = time.monotonic()
            try:
                if self._is_as_before(self._root, self.folder.stat().st_mtime_ns):
                    return Changes()
                with os.scandir(self.folder) as entries:
                    for entry in entries:
                        if entry.name not in self._shards:
                            continue
                        if entry.is_dir(follow_symlinks=False):
                            self._refresh_shard(entry, added, gone)
                        else:
                            self._pass_over(entry.name)
                self._root.settled &= all(
                    shard.settled for shard in self._shards.values() if shard.changed
                )
            except OSError:
                self._faults["unreadable"] += 1
        added.sort(key=lambda found: found[0])
        return Changes(tuple(info for _, info in added), tuple(gone))

    def get(self, key: ChunkKey, expected: codec.Expected | None = None) -> KVChunk | None:
        """The chunk, if it is whole and what was ``expected``. Otherwise its file goes into
        quarantine. A file that this process has removed meanwhile is a miss and no fault."""
        path = self._path(key)
        try:
            if not files.is_regular(path):
                self._note(key, None)
                self._pass_over(key)
                return None
            chunk = codec.read_file(path, self._allocate, self._secret, expected)
            if chunk.key != key:
                raise codec.BadChunk("it is another chunk")
        except FileNotFoundError:
            with self._guard:
                if self.contains(key) and key not in self._deleting:
                    self._miss(key, "vanished")
            return None
        except codec.BadChunk:
            self._set_aside(key)
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
            self.empty_quarantine(len(data))
            if self.nbytes + len(data) > self.max_bytes:
                return False
            return self._write(chunk.key, data)

    def room_for(self, chunk: KVChunk) -> int:
        """How many bytes a chunk takes here, at most."""
        return chunk.nbytes + 8 * chunk.info.num_tokens + codec.HEADER_BYTES

    def is_blocked(self, key: ChunkKey) -> bool:
        """Whether ``key`` cannot be written because something that is not ours has its name."""
        return files.is_blocked(self._path(key))

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

    def contains(self, key: ChunkKey) -> bool:
        with self._guard:
            return key in self._shards[key[:2]].sizes

    def keys(self) -> list[ChunkKey]:
        with self._guard:
            return [key for shard in self._shards.values() for key in shard.sizes]

    def infos(self) -> Iterator[ChunkInfo]:
        for key in self.keys():
            if (info := self.info(key)) is not None:
                yield info

    def info(self, key: ChunkKey) -> ChunkInfo | None:
        """What the header of ``key`` says now; None if it cannot be read."""
        try:
            return self._read_info(key)[0]
        except (OSError, codec.BadChunk):
            return None

    def quarantined(self) -> dict[str, int]:
        """The names and sizes of the files in quarantine, other processes' included."""
        return self._quarantine.found()

    def clear_quarantine(self) -> None:
        """Removes the files in quarantine, other processes' included."""
        with self._guard:
            self._quarantine.clear()

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
        with suppress(OSError), files.real_folder(self.folder.resolve()) as folder:
            for name in files.sizes(folder):
                if name.startswith("tmp-"):
                    with suppress(OSError):
                        files.remove(name, folder)
                        self._faults["leftover"] += 1

    def _is_as_before(self, seen: _Shard, changed: int) -> bool:
        """Whether a folder that changed at ``changed`` need not be looked at again; notes it."""
        if seen.changed == changed and seen.settled:
            return True
        seen.changed, seen.settled = changed, seen.changed == changed
        return False

    def _refresh_shard(
        self,
        entry: os.DirEntry[str],
        added: list[tuple[int, ChunkInfo]],
        gone: list[ChunkKey],
    ) -> None:
        shard = self._shards[entry.name]
        if self._is_as_before(shard, entry.stat(follow_symlinks=False).st_mtime_ns):
            return
        there: set[ChunkKey] = set()
        with os.scandir(entry.path) as found:
            for file in found:
                if not _NAME.fullmatch(file.name) or not file.name.startswith(entry.name):
                    continue
                key = ChunkKey(file.name.removesuffix(SUFFIX))
                if file.is_file(follow_symlinks=False):
                    there.add(key)
                else:
                    self._pass_over(key)
        for key in there - shard.sizes.keys() - self._passed_over:
            try:
                info, status = self._read_info(key)
                if info.key != key:
                    raise codec.BadChunk("it is another chunk")
                self._note(key, status.st_size)
                added.append((status.st_mtime_ns, info))
            except FileNotFoundError:
                continue
            except OSError:
                self._fault("unreadable")
            except Exception:  # whatever a file says, it is one fault and no more
                self._set_aside(key)
        for key in shard.sizes.keys() - there:
            self._note(key, None)
            gone.append(key)

    def _read_info(self, key: ChunkKey) -> tuple[ChunkInfo, os.stat_result]:
        """The header of a file and its status. A start reads thousands: no ``Path`` is made."""
        with files.open_regular(f"{self.folder}/{key[:2]}/{key}{SUFFIX}") as (file, status):
            data = os.read(file, codec.HEADER_BYTES)
            if (missing := codec.header_length(data) - len(data)) > 0:
                data += os.read(file, min(missing, codec.LONGEST_HEADER))
        return codec.info(codec.read_header(data), self._secret, status.st_size), status

    def _write(self, key: ChunkKey, data: bytes) -> bool:
        temporary = self.folder / f"tmp-{os.getpid()}-{uuid4().hex}"
        path = self._path(key)
        try:
            with files.real_folder(path.parent, create=True) as shard:
                if files.is_blocked(path):
                    raise FileExistsError(f"{path} is not a regular file")
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

    def _set_aside(self, key: ChunkKey) -> None:
        """Moves a file that is not a whole chunk aside. Where that is not possible, the file is
        passed over from now on."""
        with self._guard:
            self._miss(key, "corrupt")
            try:
                self._quarantine.take(self._path(key))
            except FileNotFoundError:  # another process was faster
                return
            except OSError:
                self._passed_over.add(key)

    def empty_quarantine(self, nbytes: int) -> None:
        """Removes quarantined files, the oldest first, while ``nbytes`` do not fit."""
        with self._guard:
            while self.nbytes + nbytes > self.max_bytes and self._quarantine.drop_oldest():
                pass

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
            sizes = self._shards[key[:2]].sizes
            self._nbytes -= sizes.pop(key, 0)
            if size is not None:
                sizes[key] = size
                self._nbytes += size

    def _fault(self, name: str) -> None:
        with self._guard:
            self._faults[name] += 1

    def _path(self, key: ChunkKey) -> Path:
        return self.folder / key[:2] / f"{key}{SUFFIX}"


def _kind(error: OSError) -> str:
    """What a failed write is counted as."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return "full"
    return "unwritable"
