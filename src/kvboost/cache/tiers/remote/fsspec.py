"""Chunks as files in any storage that fsspec knows: an object store, a shared folder.

``<url>/ab/<key>.safetensors``, where ``ab`` begins the key. If a filesystem can rename, a file is
written under another name first; if it cannot, as in object stores, writing a file is atomic. There
are no shared accounts, so each writer counts what its last listing showed plus what it has written
since, and lists again after an eighth of the budget. With one writer the budget holds at every
moment; each further writer may exceed it by that eighth.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import secrets
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from fsspec import AbstractFileSystem, get_filesystem_class
from fsspec.asyn import sync
from fsspec.core import url_to_fs
from fsspec.utils import get_protocol

from kvboost.cache import codec
from kvboost.cache.tiers.remote.backend import Fault
from kvboost.tokens.hashing import ChunkKey

_SUFFIX = ".safetensors"
_OURS = re.compile(r"[0-9a-f]{2}/\.?([0-9a-f]+)(\.[0-9a-f]+\.tmp|\.safetensors)")
_TIMES = ("mtime", "LastModified", "last_modified", "updated", "created")
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}

# Only whole operations can be bounded, so those that take longer are given longer.
_TRANSFER = 5
_LISTING = 30


class FsspecBackend:
    """``timeout`` bounds a small operation where the filesystem is asynchronous, as those of
    object stores are; others have no timeouts. Raises ``ValueError``, ``TypeError`` or
    ``ImportError`` if fsspec cannot serve ``url``."""

    has_index = False

    def __init__(self, url: str, max_bytes: int, *, timeout: float) -> None:
        self.max_bytes = max_bytes
        self._url = url
        self._timeout = timeout
        self._opened: tuple[int, AbstractFileSystem, str] | None = None
        self._lock = threading.Lock()
        self._sizes: dict[str, int] | None = None  # by path, least recently written first
        self._total = 0
        self._written = 0  # since the last listing
        self._writing: dict[str, str] = {}  # temporary names by path; reserved, never evicted
        self._unwanted: set[str] = set()  # deleted while they were being written
        get_filesystem_class(get_protocol(url))
        with contextlib.suppress(OSError):  # it may be down when we begin; each call tries again
            self._open()

    def fault(self, error: Exception) -> Fault:
        if isinstance(error, TimeoutError):
            return "timeout"
        if isinstance(error, OSError):
            return "full" if error.errno in _FULL else "unreachable"
        return "error"

    def get(self, key: ChunkKey, most_bytes: int | None = None) -> bytes | None:
        part = {} if most_bytes is None else {"start": 0, "end": most_bytes + 1}
        try:
            value: bytes = self._do("cat_file", self._path(key), patience=_TRANSFER, **part)
        except FileNotFoundError:
            return None
        return value if most_bytes is None or len(value) <= most_bytes else b""

    def put(
        self, key: ChunkKey, value: bytes, marks: Sequence[str] = (), *, in_front: bool = True
    ) -> bool:
        path = self._path(key)
        with self._lock:
            if path in self._writing or not self._make_room(path, len(value)):
                return False
            temporary = self._temporary(path)
            self._writing[path] = temporary
        try:
            self._write(path, temporary, value)
        except BaseException:
            with self._lock:
                del self._writing[path]
                self._unwanted.discard(path)
                with contextlib.suppress(Exception):  # it stays counted until the next listing
                    self._remove(path, temporary)
            raise
        with self._lock:
            del self._writing[path]
            if path not in self._unwanted:
                return True
            self._unwanted.remove(path)
            self._remove(path, path)
            return False

    def delete(self, key: ChunkKey) -> None:
        path = self._path(key)
        with self._lock:
            if path in self._writing:
                self._unwanted.add(path)
            else:
                self._remove(path, path)

    def contains_many(self, keys: Sequence[ChunkKey]) -> list[bool]:
        fs, _ = self._open()
        fs.invalidate_cache()
        paths = [self._path(key) for key in keys]
        if not fs.async_impl:
            return [self._is_there(path) for path in paths]

        async def ask() -> list[Any]:
            return await asyncio.gather(*(fs._info(path) for path in paths), return_exceptions=True)

        answers = sync(fs.loop, ask, timeout=self._timeout)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, FileNotFoundError):
                raise answer
        return [not isinstance(answer, FileNotFoundError) for answer in answers]

    def keys(self) -> list[ChunkKey]:
        with self._lock:
            sizes = self._list()
            _, root = self._open()
            found = (_OURS.fullmatch(path[len(root) + 1 :]) for path in sizes)
            return [ChunkKey(match[1]) for match in found if match and match[2] == _SUFFIX]

    def headers(self, keys: Sequence[ChunkKey]) -> list[bytes | None]:
        def read(paths: list[str], ends: list[int]) -> list[bytes | None]:
            answers = self._do(
                "cat_ranges", paths, [0] * len(paths), ends, on_error="return", patience=_TRANSFER
            )
            return [bytes(one) if isinstance(one, bytes) else None for one in answers]

        paths = [self._path(key) for key in keys]
        headers = read(paths, [codec.HEADER_BYTES] * len(paths))
        ends = {
            number: end
            for number, header in enumerate(headers)
            if header and (end := _end_of_header(header)) > codec.HEADER_BYTES
        }
        if ends:
            longer = read([paths[number] for number in ends], list(ends.values()))
            for number, header in zip(ends, longer, strict=True):
                headers[number] = header
        return headers

    def find(
        self, marks: Sequence[str], keys: Sequence[ChunkKey] = ()
    ) -> list[tuple[ChunkKey, bytes]]:
        return []

    def nbytes(self) -> int:
        with self._lock:
            if self._sizes is None:
                self._list()
            return self._total

    def close(self) -> None:
        self._opened = None

    def _open(self) -> tuple[AbstractFileSystem, str]:
        """The filesystem and our folder there. Asynchronous ones do not survive a fork."""
        if self._opened is None or self._opened[0] != os.getpid():
            fs, root = url_to_fs(self._url)
            self._opened = os.getpid(), fs, root.rstrip("/")
        return self._opened[1:]

    def _do(self, name: str, *args: Any, patience: int = 1, **kwargs: Any) -> Any:
        fs, _ = self._open()
        if fs.async_impl:
            operation = getattr(fs, f"_{name}")
            return sync(fs.loop, operation, *args, timeout=patience * self._timeout, **kwargs)
        return getattr(fs, name)(*args, **kwargs)

    def _path(self, key: ChunkKey) -> str:
        return f"{self._open()[1]}/{key[:2]}/{key}{_SUFFIX}"

    def _temporary(self, path: str) -> str:
        """Where ``path`` is written first; itself where nothing can be moved."""
        fs, _ = self._open()
        if fs.async_impl or type(fs).mv is AbstractFileSystem.mv:
            return path
        folder, _, name = path.rpartition("/")
        return f"{folder}/.{name.removesuffix(_SUFFIX)}.{secrets.token_hex(8)}.tmp"

    def _write(self, path: str, temporary: str, value: bytes) -> None:
        fs, _ = self._open()
        if not fs.async_impl:
            fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._do("pipe_file", temporary, value, patience=_TRANSFER)
        if temporary != path:
            fs.mv(temporary, path)

    def _is_there(self, path: str) -> bool:
        try:
            self._do("info", path)
        except FileNotFoundError:
            return False
        return True

    def _list(self) -> dict[str, int]:
        """Looks again at what is there. The lock must be held."""
        fs, root = self._open()
        fs.invalidate_cache()
        listing: dict[str, dict[str, Any]] = self._do("find", root, detail=True, patience=_LISTING)
        unfinished = set(self._writing.values())
        sizes = {
            path: int(details["size"] or 0)
            for path, details in sorted(listing.items(), key=lambda item: _time_of(item[1]))
            if path not in unfinished and _OURS.fullmatch(path[len(root) + 1 :])
        }
        sizes |= {path: (self._sizes or {})[path] for path in self._writing}
        self._sizes = sizes
        self._total = sum(sizes.values())
        self._written = 0
        return sizes

    def _make_room(self, path: str, size: int) -> bool:
        """Reserves ``size`` bytes for ``path``; what goes is deleted before that. False if it
        cannot fit. The lock must be held."""
        if size > self.max_bytes:
            return False
        sizes = self._sizes
        if sizes is None or self._written > self.max_bytes // 8:
            sizes = self._list()
        if path in sizes:
            self._remove(path, path)
        while self._total + size > self.max_bytes:
            oldest = next((path for path in sizes if path not in self._writing), None)
            if oldest is None:
                return False
            self._remove(oldest, oldest)
        sizes[path] = size
        self._total += size
        self._written += size
        return True

    def _remove(self, path: str, name: str) -> None:
        """Deletes the file ``name`` and then no longer counts ``path``; raises, and counts it on,
        if that fails. The lock must be held."""
        with contextlib.suppress(FileNotFoundError):
            self._do("rm_file", name)
        if self._sizes is not None:
            self._total -= self._sizes.pop(path, 0)


def _end_of_header(data: bytes) -> int:
    """Where the header ends of a file that begins with ``data``; 0 if it is not a chunk's."""
    try:
        return codec.header_length(data)
    except codec.BadChunk:
        return 0


def _time_of(details: Mapping[str, Any]) -> float:
    """When a file was written, in seconds; filesystems say so in different words."""
    for name in _TIMES:
        value = details.get(name)
        if isinstance(value, (int, float)):
            return float(value)
        if value is not None and not isinstance(value, str):
            return float(value.timestamp())
    return 0.0
