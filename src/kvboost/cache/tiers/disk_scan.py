"""Looking at the files of a cache folder: their names, and the headers of those that are new.

A look takes as long as the disk does, so no lock is held and nothing is changed. Names that are not
ours cost one comparison; a file that is not a chunk costs one small read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field

from kvboost.cache import codec
from kvboost.cache.chunk import ChunkInfo
from kvboost.cache.secret import Secret
from kvboost.cache.tiers import files
from kvboost.tokens.hashing import ChunkKey

SUFFIX = ".safetensors"

_NAME = re.compile(rf"[0-9a-f]{{32}}{re.escape(SUFFIX)}")


@dataclass
class Headers:
    """The files of one folder by what their headers say."""

    chunks: list[tuple[ChunkInfo, os.stat_result]] = field(default_factory=list)
    others: list[tuple[ChunkKey, os.stat_result]] = field(default_factory=list)
    """Chunks that another version of KVBoost wrote."""
    damaged: list[ChunkKey] = field(default_factory=list)
    unreadable: int = 0


def is_chunk_name(name: str) -> bool:
    return _NAME.fullmatch(name) is not None


def names_in(folder: os.DirEntry[str]) -> tuple[set[ChunkKey], list[ChunkKey]]:
    """The keys of the files in one of the 256 folders, and those that are not regular files. Raises
    ``OSError``."""
    regular: set[ChunkKey] = set()
    foreign: list[ChunkKey] = []
    with os.scandir(folder.path) as entries:
        for entry in entries:
            if is_chunk_name(entry.name) and entry.name.startswith(folder.name):
                key = ChunkKey(entry.name.removesuffix(SUFFIX))
                if entry.is_file(follow_symlinks=False):
                    regular.add(key)
                else:
                    foreign.append(key)
    return regular, foreign


def read_headers(folder: str, keys: Iterable[ChunkKey], secret: Secret | None) -> Headers:
    """The headers of these files. Raises ``OSError`` if the folder cannot be opened."""
    found = Headers()
    with files.real_folder(folder) as descriptor:
        for key in keys:
            try:
                data, status = _read_start(key, descriptor)
            except FileNotFoundError:
                continue
            except OSError:
                found.unreadable += 1
                continue
            try:
                info = codec.info(codec.read_header(data), secret, status.st_size)
                if info.key != key:
                    raise codec.BadChunk("it is another chunk")
                found.chunks.append((info, status))
            except codec.OtherVersion:
                found.others.append((key, status))
            except Exception:  # whatever a file says, it is one fault and no more
                found.damaged.append(key)
    return found


def read_info(key: ChunkKey, folder: int, secret: Secret | None) -> ChunkInfo:
    """The header of a file. Raises ``OSError`` and ``BadChunk``."""
    data, status = _read_start(key, folder)
    return codec.info(codec.read_header(data), secret, status.st_size)


def _read_start(key: ChunkKey, folder: int) -> tuple[bytes, os.stat_result]:
    """The first bytes of a file, up to the end of its header if it has one, and its status. Raises
    ``OSError``."""
    with files.open_regular(f"{key}{SUFFIX}", folder) as (file, status):
        data = os.read(file, codec.HEADER_BYTES)
        if len(data) == codec.HEADER_BYTES:
            with suppress(codec.BadChunk):
                missing = codec.header_length(data) - len(data)
                data += os.read(file, missing) if missing > 0 else b""
    return data, status
