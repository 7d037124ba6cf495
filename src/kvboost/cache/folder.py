"""A cache folder seen from outside: what lies in it, whether it is whole, taking some of it away
or elsewhere. No model is needed, and engines may be at work in it meanwhile."""

from __future__ import annotations

import io
import os
import re
import sys
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from kvboost.cache import codec
from kvboost.cache.chunk import ChunkInfo, Origin
from kvboost.cache.lookup.anchors import WINDOW
from kvboost.cache.lookup.catalogue import Catalogue, holding
from kvboost.cache.tiers.disk import LOCK_SECONDS, SUFFIX, DiskTier
from kvboost.errors import CacheFolderError, ConfigError, ForgetError
from kvboost.progress import Progress
from kvboost.tokens.hashing import ChunkKey
from kvboost.tokens.prompt import PromptReader
from kvboost.tokens.text import Tokenizer

_MEMBER = re.compile(rf"([0-9a-f]{{2}})/(\1[0-9a-f]{{30}}){re.escape(SUFFIX)}")


@dataclass(frozen=True)
class Entry:
    """One chunk in the folder."""

    info: ChunkInfo
    nbytes: int
    """Of its file."""
    used: float
    """When it was written or read last, in seconds since 1970."""
    depth: int
    """How many chunks of the folder stand before it, one behind the other."""


@dataclass(frozen=True)
class ModelSummary:
    name: str
    fingerprint: str
    bits: tuple[int, ...]
    chunks: int
    tokens: int
    nbytes: int


@dataclass(frozen=True)
class Summary:
    models: tuple[ModelSummary, ...]
    quarantined: int
    """Files that were not what they said."""
    quarantined_bytes: int

    @property
    def chunks(self) -> int:
        return sum(model.chunks for model in self.models)

    @property
    def tokens(self) -> int:
        return sum(model.tokens for model in self.models)

    @property
    def nbytes(self) -> int:
        """Of all files, quarantine included."""
        return sum(model.nbytes for model in self.models) + self.quarantined_bytes


@dataclass(frozen=True)
class Verdict:
    ok: int
    bad: int
    """Files that are not whole chunks; they are in quarantine now."""
    unreadable: int
    """Files that the system does not let us read; they stay where they are."""

    def __bool__(self) -> bool:
        return not self.bad and not self.unreadable


@dataclass(frozen=True)
class Exported:
    chunks: int
    nbytes: int
    """Of the archive."""
    bad: int
    """Files that were left out because they cannot be read whole."""


@dataclass(frozen=True)
class Imported:
    installed: int
    present: int
    """Those that were here already."""
    refused: int
    """Members of the archive that are not whole chunks under their own name."""
    no_room: int
    """Chunks that the budget had no room for."""


class CacheFolder:
    """What was in a folder when it was opened. Files whose beginning is not that of a chunk go
    into quarantine then, as they do when an engine starts.

    Raises ``CacheFolderError`` if there is no cache at ``path``; ``create`` makes one there, unless
    something else is there already. ``max_bytes`` is the budget of what ``install`` adds.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, create: bool = False, max_bytes: int = sys.maxsize
    ) -> None:
        self.path = Path(path).expanduser()
        if not _may_open(self.path, create):
            what = "is not" if self.path.exists() else "does not exist, so it is not"
            raise CacheFolderError(
                f"{str(self.path)!r} {what} a cache folder; name the one that an engine was given "
                "as disk_cache_dir, or `kvboost generate` as --cache-dir"
            )
        self._tier = DiskTier(self.path, max_bytes)
        self._infos: dict[ChunkKey, ChunkInfo] = {}
        self._look()

    def entries(self, model: str | None = None) -> list[Entry]:
        """The chunks, of all models or of one, what was used last coming first."""
        depths: dict[ChunkKey, int] = {}
        for info in _front_to_end(self._infos.values()):
            depths[info.key] = depths.get(info.parent, -1) + 1
        found = []
        for info in self._of(model):
            with suppress(OSError):  # gone meanwhile
                stat = self._file(info.key).stat()
                found.append(Entry(info, stat.st_size, stat.st_mtime, depths[info.key]))
        return sorted(found, key=lambda entry: -entry.used)

    def summary(self, model: str | None = None) -> Summary:
        grouped: dict[Origin, list[Entry]] = {}
        for entry in self.entries(model):
            grouped.setdefault(entry.info.origin, []).append(entry)
        quarantined = self._quarantined()
        return Summary(
            tuple(
                ModelSummary(
                    origin.name,
                    origin.fingerprint,
                    tuple(sorted({entry.info.bits for entry in entries})),
                    len(entries),
                    sum(entry.info.num_tokens for entry in entries),
                    sum(entry.nbytes for entry in entries),
                )
                for origin, entries in grouped.items()
            ),
            len(quarantined),
            sum(quarantined.values()),
        )

    def verify(self) -> Verdict:
        """Reads every file and holds it against its checksum. What is not a whole chunk is put
        into quarantine; when chunks were used last stays as it was."""
        counts: Counter[str] = Counter()
        keys = self._keys()
        with (
            Progress(f"verifying {self.path}") as progress,
            progress.step(f"reading {len(keys):,} chunks", len(keys)) as step,
        ):
            for key in keys:
                try:
                    counts["ok"] += self._read(key) is not None
                except OSError:
                    counts["unreadable"] += 1
                step.advance()
        return Verdict(counts["ok"], self._tier.faults.get("corrupt", 0), counts["unreadable"])

    def clear(self, model: str | None = None) -> int:
        """Removes every chunk, or those of one model, and all that is in quarantine; returns how
        many files there were. Raises ``CacheFolderError`` if some could not be removed."""
        with self._alone():
            self._look()
            keys = self._keys() if model is None else [info.key for info in self._of(model)]
            count = len(keys) + len(self._quarantined())
            left = self._remove(keys)
        if left:
            raise CacheFolderError(
                f"{left} of {count} files in {str(self.path)!r} could not be removed; see that "
                "they can be written and clear again"
            )
        return count

    def export(
        self, target: str | os.PathLike[str], *, model: str | None = None, key: str | None = None
    ) -> Exported:
        """Writes chunks into a ``.tar`` file: all, those of one model, or one chunk and those it
        was read behind. They are checked on the way. ``target`` is there when it is complete."""
        target = Path(target).expanduser()
        infos = self._of(model) if key is None else self._path_to(key, self._of(model))
        temporary = target.with_name(f"{target.name}.{uuid4().hex}.tmp")
        written = 0
        try:
            with (
                open(temporary, "xb", opener=_private) as file,
                tarfile.open(fileobj=file, mode="w:") as archive,
                Progress(f"exporting {self.path}") as progress,
                progress.step(f"writing {len(infos):,} chunks", len(infos)) as step,
            ):
                for info in _front_to_end(infos):
                    written += self._add_to(archive, info.key)
                    step.advance()
            os.replace(temporary, target)
            return Exported(written, target.stat().st_size, len(infos) - written)
        except OSError as error:
            raise CacheFolderError(
                f"{str(target)!r} cannot be written: {error.strerror or error}; choose another file"
            ) from error
        finally:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def install(self, source: str | os.PathLike[str]) -> Imported:
        """Takes the chunks of an exported file in. Every one is checked before it is written, and
        nothing but chunks is: a member that is anything else is refused. What is here stays; what
        the budget has no room for is left out.

        A checksum says that a chunk is whole, not who made it: it should come from someone who
        may say what a model has read.
        """
        source = Path(source).expanduser()
        counts: Counter[str] = Counter()
        left_out: set[ChunkKey] = set()
        try:
            longest = source.stat().st_size
            with (
                source.open("rb") as file,
                tarfile.open(fileobj=file, mode="r:") as archive,
                Progress(f"importing {source}") as progress,
                progress.step("reading chunks", longest) as step,
            ):
                for member in archive:
                    counts[self._take(archive, member, longest, left_out)] += 1
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
                f"{counts['installed']} chunks were installed before; export it again"
            ) from error
        self._look()
        names = ("installed", "present", "refused", "no_room")
        return Imported(**{name: counts[name] for name in names})

    def forget(self, text: str, tokenizer: Tokenizer) -> int:
        """Removes every chunk that holds ``text`` (of a long one: 32 tokens in a row of it), every
        chunk that was read behind one of those, and all that is in quarantine; returns how many
        chunks there were. Raises ``ForgetError`` if some of it may still be here. Engines at work
        keep what they hold in memory."""
        texts = PromptReader(tokenizer, vocab_size=0).inside(text)
        with self._alone():
            self._look()
            catalogue = Catalogue(WINDOW)
            for info in self._infos.values():
                catalogue.add(info)
            keys = holding(catalogue.infos(), texts)
            unknown = len(set(self._keys()) - set(self._infos))
            left = self._remove(keys)
        if left or unknown:
            raise ForgetError(
                f"of {len(keys)} chunks that hold this text, and of quarantine, {left} files could "
                f"not be removed from {str(self.path)!r}, and {unknown} could not be read; see "
                "that they can be read and written, and call again"
            )
        return len(keys)

    def models(self) -> list[str]:
        """Names of the models whose chunks are here."""
        return sorted({info.origin.name for info in self._infos.values()})

    def _look(self) -> None:
        """Notices what became of the folder."""
        changes = self._tier.refresh(now=True)
        self._infos |= {info.key: info for info in changes.added}
        for key in changes.gone:
            self._infos.pop(key, None)

    def _file(self, key: ChunkKey) -> Path:
        return self.path / _member_name(key)

    def _keys(self) -> list[ChunkKey]:
        """Of every file that is called like a chunk."""
        names = (path.relative_to(self.path).as_posix() for path in self.path.glob("??/*"))
        return [ChunkKey(match[2]) for name in names if (match := _MEMBER.fullmatch(name))]

    def _quarantined(self) -> dict[Path, int]:
        """The files in quarantine and their sizes."""
        found = {}
        for path in (self.path / "quarantine").glob("*"):
            with suppress(OSError):  # gone meanwhile
                found[path] = path.stat().st_size
        return found

    def _of(self, model: str | None) -> list[ChunkInfo]:
        """The chunks of a model, by its name or by the beginning of its fingerprint."""
        if model is None:
            return list(self._infos.values())
        there = {info.origin for info in self._infos.values()}
        chosen = {origin for origin in there if origin.name == model}
        if not chosen and model:
            chosen = {origin for origin in there if origin.fingerprint.startswith(model)}
            chosen = chosen if len({origin.fingerprint for origin in chosen}) == 1 else set()
        if not chosen:
            known = sorted(f"{origin.name} ({origin.fingerprint[:12]})" for origin in there)
            raise ConfigError(
                f"model={model!r} is not the name of one whose chunks are in {str(self.path)!r}, "
                f"nor the beginning of one fingerprint; there are {', '.join(known) or 'none'}"
            )
        return [info for info in self._infos.values() if info.origin in chosen]

    def _path_to(self, key: str, infos: Iterable[ChunkInfo]) -> list[ChunkInfo]:
        """The chunk whose key begins with ``key``, and those before it."""
        found = [info for info in infos if info.key.startswith(key)]
        if len(found) != 1:
            raise ConfigError(
                f"key={key!r} begins the keys of {len(found)} chunks in {str(self.path)!r}; give "
                "one that `kvboost cache ls` shows"
            )
        while (parent := self._infos.get(found[-1].parent)) is not None:
            found.append(parent)
        return found

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Nobody else writes meanwhile."""
        with self._tier.exclusive() as locked:
            if not locked:
                raise CacheFolderError(
                    f"{str(self.path)!r} could not be locked for {LOCK_SECONDS:.0f} s; see that it "
                    "can be written, or wait until other processes have written"
                )
            yield

    def _remove(self, keys: Iterable[ChunkKey]) -> int:
        """Removes chunks, and what is in quarantine; returns how many files are left of that."""
        keys = list(keys)
        for key in keys:
            self._tier.delete(key)
        self._tier.clear_quarantine()
        left = [key for key in keys if os.path.lexists(self._file(key))]
        for key in set(keys).difference(left):
            self._infos.pop(key, None)
        return len(left) + len(self._quarantined())

    def _read(self, key: ChunkKey) -> bytes | None:
        """A file's bytes, checked; None if it is gone, or not whole and in quarantine now. Does
        not count as use."""
        try:
            data = self._file(key).read_bytes()
            if codec.decode(data).key == key:
                return data
        except FileNotFoundError:
            return None
        except codec.BadChunk:
            pass
        self._tier.get(key)  # sees the same, and puts it aside
        return None

    def _add_to(self, archive: tarfile.TarFile, key: ChunkKey) -> bool:
        try:
            data = self._read(key)
        except OSError:
            return False
        if data is None:
            return False
        member = tarfile.TarInfo(_member_name(key))
        member.size, member.mode = len(data), 0o600
        archive.addfile(member, io.BytesIO(data))
        return True

    def _take(
        self,
        archive: tarfile.TarFile,
        member: tarfile.TarInfo,
        longest: int,
        left_out: set[ChunkKey],
    ) -> str:
        """Installs one member; returns what became of it. Its name is only held against the key:
        where it is written follows from the key, which follows from its tokens. What has no room
        is ``left_out``, and what was read behind it as well: a beginning serves without its end."""
        match = _MEMBER.fullmatch(member.name)
        if match is None or not member.isreg() or member.issparse() or member.size > longest:
            return "refused"
        key = ChunkKey(match[2])
        file = archive.extractfile(member)
        assert file is not None  # it is a regular file
        try:
            chunk = codec.decode(file.read())
        except (codec.BadChunk, LookupError):
            return "refused"
        if chunk.key != key:
            return "refused"
        with self._alone():
            self._tier.refresh(now=True)
            if self._tier.contains(key):
                return "present"
            faults = self._tier.faults
            if chunk.info.parent not in left_out and self._tier.put(chunk):
                return "installed"
            if self._tier.faults == faults:
                left_out.add(key)
                return "no_room"
        raise CacheFolderError(
            f"{str(self.path)!r} cannot be written; see that its disk has room and that it is yours"
        )


def _may_open(path: Path, create: bool) -> bool:
    """Whether a cache is at ``path``, or may be made there. Other folders are never touched: what
    opens a cache tidies it up."""
    try:
        return "kvboost" in (path / "CACHEDIR.TAG").read_text()
    except (OSError, ValueError):
        return create and (not path.exists() or (path.is_dir() and not any(path.iterdir())))


def _private(path: str, flags: int) -> int:
    """Opens a file that is its owner's alone, as the folder is."""
    return os.open(path, flags, 0o600)


def _member_name(key: ChunkKey) -> str:
    """What a chunk is called in an archive, and in the folder."""
    return f"{key[:2]}/{key}{SUFFIX}"


def _front_to_end(infos: Iterable[ChunkInfo]) -> list[ChunkInfo]:
    """Every chunk behind those it was read behind."""
    return sorted(infos, key=lambda info: info.base_position)
