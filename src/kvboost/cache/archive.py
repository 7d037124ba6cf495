"""Chunks in a ``.tar`` file: each is a member, under the name that it has in a cache folder."""

from __future__ import annotations

import io
import os
import re
import stat
import tarfile
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from kvboost.cache import codec
from kvboost.cache.chunk import KVChunk
from kvboost.cache.secret import Secret
from kvboost.cache.tiers.disk_scan import SUFFIX
from kvboost.errors import CacheFolderError
from kvboost.progress import Progress
from kvboost.tokens.hashing import ChunkKey

_MEMBER = re.compile(rf"([0-9a-f]{{2}})/(\1[0-9a-f]{{30}}){re.escape(SUFFIX)}")


@dataclass(frozen=True)
class Exported:
    chunks: int
    nbytes: int
    """Size of the archive."""
    bad: int
    """Files that were left out because they are damaged or cannot be read."""


@dataclass(frozen=True)
class Imported:
    installed: int
    present: int
    """Chunks that the folder had already, perhaps from another version of KVBoost."""
    refused: int
    """Members of the archive that are not whole chunks under their own name, or not signed with
    our secret."""
    no_room: int
    """Chunks that did not fit into the budget."""


def member_name(key: ChunkKey) -> str:
    """The name of a chunk in an archive and in a folder."""
    return f"{key[:2]}/{key}{SUFFIX}"


def key_in(name: str) -> ChunkKey | None:
    """The key of the chunk that has this name; None if it is no chunk's."""
    match = _MEMBER.fullmatch(name)
    return None if match is None else ChunkKey(match[2])


def write_archive(
    target: Path, title: str, keys: Sequence[ChunkKey], read: Callable[[ChunkKey], bytes | None]
) -> Exported:
    """Writes the chunks that ``read`` returns. ``target`` appears when it is complete."""
    temporary = target.with_name(f"{target.name}.{uuid4().hex}.tmp")
    written = 0
    try:
        with (
            open(temporary, "xb", opener=_private) as file,
            tarfile.open(fileobj=file, mode="w:") as archive,
            Progress(title) as progress,
            progress.step(f"writing {len(keys):,} chunks", len(keys)) as step,
        ):
            for key in keys:
                if (data := read(key)) is not None:
                    member = tarfile.TarInfo(member_name(key))
                    member.size, member.mode = len(data), 0o600
                    archive.addfile(member, io.BytesIO(data))
                    written += 1
                step.advance()
        os.replace(temporary, target)
        return Exported(written, target.stat().st_size, len(keys) - written)
    except OSError as error:
        raise CacheFolderError(
            f"{str(target)!r} cannot be written: {error.strerror or error}; choose another file"
        ) from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_archive(
    source: Path, secret: Secret | None, install: Callable[[KVChunk], str]
) -> Imported:
    """Gives every whole chunk of an archive to ``install``, which says what it did with it:
    ``"installed"``, ``"present"`` or ``"no_room"``."""
    counts: Counter[str] = Counter()
    try:
        status = source.stat()
        if not stat.S_ISREG(status.st_mode):
            raise tarfile.ReadError("it is not a regular file")
        longest = status.st_size
        with (
            source.open("rb") as file,
            tarfile.open(fileobj=file, mode="r:") as archive,
            Progress(f"importing {source}") as progress,
            progress.step("reading chunks", longest) as step,
        ):
            for member in archive:
                chunk = _chunk_in(archive, member, longest, secret)
                counts["refused" if chunk is None else install(chunk)] += 1
                step.advance(member.size)
            file.seek(archive.offset)
            if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("it is damaged or cut off")  # tarfile just stops
    except CacheFolderError:
        raise
    except (tarfile.TarError, OSError, ValueError, ArithmeticError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CacheFolderError(
            f"{str(source)!r} cannot be read as an exported cache ({reason}); "
            f"{counts['installed']} chunks were installed before that; name a file that "
            "`kvboost cache export` wrote, or export it again"
        ) from error
    names = ("installed", "present", "refused", "no_room")
    return Imported(**{name: counts[name] for name in names})


def _chunk_in(
    archive: tarfile.TarFile, member: tarfile.TarInfo, longest: int, secret: Secret | None
) -> KVChunk | None:
    """The whole chunk of a member; None if it is none. The member's name is only compared with the
    key, which follows from the tokens."""
    key = key_in(member.name)
    if key is None or not member.isreg() or member.issparse() or member.size > longest:
        return None
    file = archive.extractfile(member)
    assert file is not None  # it is a regular file
    try:
        chunk = codec.decode(file.read(), secret)
    except (codec.BadChunk, LookupError):
        return None
    return chunk if chunk.key == key else None


def _private(path: str, flags: int) -> int:
    """Opens a file that only its owner can read, as the folder."""
    return os.open(path, flags, 0o600)
