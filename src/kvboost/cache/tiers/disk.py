"""Chunks in a folder that any number of processes share.

One file per chunk, named after its key, in one of 256 folders; there is no other index. A file is
written under a temporary name, flushed and renamed, by one process at a time (a lock file says
who), so a temporary file that is there while nobody holds the lock is a dead process's and goes.
Reading takes no lock. What is not a whole chunk is a miss and is put into quarantine::

    ab/ab12….safetensors     a chunk
    quarantine/              files that were not what they said, the last few
    tmp-…                    a file that is being written
    .lock  CACHEDIR.TAG
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
from kvboost.errors import CacheFolderError
from kvboost.tokens.hashing import ChunkKey

SUFFIX = ".safetensors"
MOST_QUARANTINED = 16
LOCK_SECONDS = 10.0
"""How long a write waits for other processes that write."""
REFRESH_SECONDS = 0.05
"""Other processes' chunks are noticed this late. Longer than a tick of a file system's clock."""

_OURS = re.compile(r"[0-9a-f]{2}|quarantine|tmp-\d+-[0-9a-f]{32}|\.lock|CACHEDIR\.TAG")
_NAME = re.compile(rf"[0-9a-f]{{32}}{re.escape(SUFFIX)}")
_TAG = (
    "Signature: 8a477f597d28d172789f06886806bc55\n# A cache of kvboost: see kvboost cache --help\n"
)


@dataclass(frozen=True)
class Changes:
    """What became of the folder since the last look. ``added`` begins with what was used longest
    ago."""

    added: tuple[ChunkInfo, ...] = ()
    gone: tuple[ChunkKey, ...] = ()


@dataclass
class _Shard:
    """One of the folders: when it had changed at the last look, and what was there."""

    changed: int = 0
    settled: bool = False
    """Whether it has been looked at again since: a file may be added within one tick of the clock
    by which a change is seen."""
    sizes: dict[ChunkKey, int] = field(default_factory=dict)


class DiskTier:
    """Thread-safe. Raises ``CacheFolderError`` when the folder can be neither made nor read, and
    nothing afterwards. ``allocate`` says where what is read shall lie."""

    name = "disk"

    def __init__(
        self,
        folder: str | os.PathLike[str],
        max_bytes: int,
        *,
        allocate: codec.Allocate = torch.empty_like,
    ) -> None:
        self.folder = Path(folder).expanduser()
        self.max_bytes = max_bytes
        self._allocate = allocate
        self._shards = {f"{number:02x}": _Shard() for number in range(256)}
        self._nbytes = 0
        self._quarantined: dict[str, int] = {}
        self._root = _Shard()
        self._refreshed = float("-inf")
        self._faults: Counter[str] = Counter()
        self._guard = threading.RLock()
        self._lock = FileLock(self.folder / ".lock", timeout=LOCK_SECONDS, mode=0o600)
        self._prepare()

    @property
    def nbytes(self) -> int:
        with self._guard:
            return self._nbytes + sum(self._quarantined.values())

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
                        if entry.name in self._shards and entry.is_dir():
                            self._refresh_shard(entry, added, gone)
                self._root.settled &= all(
                    shard.settled for shard in self._shards.values() if shard.changed
                )
            except OSError:
                self._faults["unreadable"] += 1
        added.sort(key=lambda one: one[0])
        return Changes(tuple(info for _, info in added), tuple(gone))

    def get(self, key: ChunkKey) -> KVChunk | None:
        path = self._path(key)
        try:
            chunk = codec.read_file(path, self._allocate)
            if chunk.key != key:
                raise codec.BadChunk("it is another chunk")
        except FileNotFoundError:
            self._miss(key, "vanished")
            return None
        except codec.BadChunk:
            self._quarantine(key)
            return None
        except Exception:  # such as no memory, no file handles: the file may be fine
            self._miss(key, "unreadable")
            return None
        with suppress(OSError):  # the next start takes this for when it was used last
            os.utime(path)
        return chunk

    def put(self, chunk: KVChunk) -> bool:
        data = codec.encode(chunk)
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

    @contextmanager
    def exclusive(self) -> Iterator[bool]:
        """No other process or thread writes meanwhile; false if that cannot be had. May be
        entered again by the thread that is in it."""
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
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError:
            self._fault("undeleted")
            return
        self._note(key, None)

    def contains(self, key: ChunkKey) -> bool:
        with self._guard:
            return key in self._shards[key[:2]].sizes

    def keys(self) -> list[ChunkKey]:
        with self._guard:
            return [key for shard in self._shards.values() for key in shard.sizes]

    def infos(self) -> Iterator[ChunkInfo]:
        for key in self.keys():
            try:
                yield self._read_info(self._path(key))
            except (OSError, codec.BadChunk):
                continue

    def clear_quarantine(self) -> None:
        """Removes the files that were not what they said, other processes' too."""
        with self._guard:
            for path in (self.folder / "quarantine").glob("*"):
                with suppress(OSError):
                    path.unlink(missing_ok=True)
            self._quarantined.clear()

    def close(self) -> None:
        """What is on disk stays."""

    def _prepare(self) -> None:
        tag = self.folder / "CACHEDIR.TAG"
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            foreign = [
                path.name for path in self.folder.iterdir() if not _OURS.fullmatch(path.name)
            ]
            if foreign or (tag.exists() and "kvboost" not in tag.read_text()):
                raise CacheFolderError(
                    f"disk_cache_dir={str(self.folder)!r} holds other files, such as "
                    f"{min(foreign, default=tag.name)!r}; choose a new folder or an empty one"
                )
            with suppress(OSError):
                self.folder.chmod(0o700)
        except CacheFolderError:
            raise
        except (OSError, UnicodeDecodeError) as error:
            raise CacheFolderError(
                f"disk_cache_dir={str(self.folder)!r} cannot be used as a folder: "
                f"{getattr(error, 'strerror', None) or error}; choose another one"
            ) from error
        with self.exclusive() as locked:
            if locked:
                for left in self.folder.glob("tmp-*"):  # nobody writes now
                    with suppress(OSError):
                        left.unlink()
                        self._faults["leftover"] += 1
                if not tag.exists():
                    with suppress(OSError):
                        tag.write_text(_TAG)
        with suppress(OSError):
            for entry in os.scandir(self.folder / "quarantine"):
                self._quarantined[entry.name] = entry.stat().st_size

    def _is_as_before(self, seen: _Shard, changed: int) -> bool:
        """Whether a folder that has ``changed`` then need not be looked at again; notes it."""
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
        if self._is_as_before(shard, entry.stat().st_mtime_ns):
            return
        with os.scandir(entry.path) as files:
            there = {
                ChunkKey(file.name.removesuffix(SUFFIX)): file
                for file in files
                if _NAME.fullmatch(file.name) and file.name.startswith(entry.name)
            }
        for key in there.keys() - shard.sizes.keys():
            try:
                info, stat = self._read_info(Path(there[key].path)), there[key].stat()
                if info.key != key:
                    raise codec.BadChunk("it is another chunk")
                self._note(key, stat.st_size)
                added.append((stat.st_mtime_ns, info))
            except codec.BadChunk:
                self._quarantine(key)
            except FileNotFoundError:
                continue
            except OSError:
                self._fault("unreadable")
        for key in shard.sizes.keys() - there.keys():
            self._note(key, None)
            gone.append(key)

    def _read_info(self, path: Path) -> ChunkInfo:
        with path.open("rb", buffering=0) as file:
            data = file.read(codec.HEADER_BYTES) or b""
            if (missing := codec.header_length(data) - len(data)) > 0:
                data += file.read(min(missing, 1 << 24)) or b""
        return codec.info(codec.read_header(data))

    def _write(self, key: ChunkKey, data: bytes) -> bool:
        temporary = self.folder / f"tmp-{os.getpid()}-{uuid4().hex}"
        path = self._path(key)
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            with open(temporary, "xb", buffering=0) as file:
                view = memoryview(data)
                while view:
                    view = view[file.write(view) :]
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            self._fault(_kind(error))
            return False
        self._note(key, len(data))
        return True

    def _quarantine(self, key: ChunkKey) -> None:
        """Puts a file that is not a whole chunk aside; where that cannot be done it is passed
        over from now on."""
        with self._guard:
            self._miss(key, "corrupt")
            path = self._path(key)
            aside = self.folder / "quarantine" / path.name
            with suppress(OSError):
                aside.parent.mkdir(mode=0o700, exist_ok=True)
                os.replace(path, aside)
                self._quarantined.pop(aside.name, None)
                self._quarantined[aside.name] = aside.stat().st_size
            while len(self._quarantined) > MOST_QUARANTINED:
                self._drop_quarantined(next(iter(self._quarantined)))

    def empty_quarantine(self, nbytes: int) -> None:
        """Lets quarantined files go, the oldest first, while ``nbytes`` do not fit."""
        with self._guard:
            while self._quarantined and self.nbytes + nbytes > self.max_bytes:
                self._drop_quarantined(next(iter(self._quarantined)))

    def _drop_quarantined(self, name: str) -> None:
        with suppress(OSError):
            (self.folder / "quarantine" / name).unlink(missing_ok=True)
        del self._quarantined[name]

    def _miss(self, key: ChunkKey, fault: str) -> None:
        self._note(key, None)
        self._fault(fault)

    def _note(self, key: ChunkKey, size: int | None) -> None:
        """``key`` takes ``size`` bytes, or is not there."""
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
