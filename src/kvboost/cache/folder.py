"""A cache folder seen from outside: listing, verifying, removing, exporting and importing chunks.
No model is needed, and engines may use the folder meanwhile."""

from __future__ import annotations

import io
import os
import re
import stat
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
from kvboost.cache.lookup.catalogue import Catalogue, holding, preceding
from kvboost.cache.secret import Secret
from kvboost.cache.tiers import files
from kvboost.cache.tiers.disk import LOCK_SECONDS, SUFFIX, DiskTier, is_cache_folder
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
    """Size of its file."""
    used: float
    """When it was last written or read, in seconds since 1970."""
    depth: int
    """How many chunks of the folder precede it, each following the last."""


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
        """Size of all files, quarantine included."""
        return sum(model.nbytes for model in self.models) + self.quarantined_bytes


@dataclass(frozen=True)
class Verdict:
    ok: int
    bad: int
    """Files that are not whole chunks; they are in quarantine now."""
    unreadable: int
    """Files that the system does not let us read; they stay where they are."""
    signed: int = 0
    """Signed chunks that cannot be checked, because no secret was given."""

    def __bool__(self) -> bool:
        return not (self.bad or self.unreadable or self.signed)


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
    """Chunks that the folder had already."""
    refused: int
    """Members of the archive that are not whole chunks under their own name, or not signed with
    our secret."""
    no_room: int
    """Chunks that did not fit into the budget."""


class CacheFolder:
    """The chunks that were in a folder when it was opened. Opening moves files whose header is not
    that of a chunk into quarantine, as the start of an engine does.

    Raises ``CacheFolderError`` if there is no cache at ``path``. ``create`` makes one there, unless
    something else is there already. ``max_bytes`` is the budget for ``install``. ``secret`` is the
    engines' ``cache_secret``: with it, every chunk must be signed with it; without it, signed
    chunks can be listed and removed, but not checked or exported.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = False,
        max_bytes: int = sys.maxsize,
        secret: str | None = None,
    ) -> None:
        self.path = Path(path).expanduser()
        if not _may_open(self.path, create):
            what = "is not" if self.path.exists() else "does not exist, so it is not"
            raise CacheFolderError(
                f"{str(self.path)!r} {what} a cache folder; name the one that an engine was given "
                "as disk_cache_dir, or `kvboost generate` as --cache-dir"
            )
        self._secret = Secret(secret) if secret else None
        self._tier = DiskTier(self.path, max_bytes, secret=self._secret)
        self._infos: dict[ChunkKey, ChunkInfo] = {}
        self._look()

    def entries(self, model: str | None = None) -> list[Entry]:
        """The chunks of all models or of one, the last used first."""
        depths: dict[ChunkKey, int] = {}
        for info in _front_to_end(self._infos.values()):
            depths[info.key] = depths.get(info.parent, -1) + 1
        found = []
        for info in self._of(model):
            with suppress(OSError):  # removed meanwhile
                status = os.lstat(self._file(info.key))
                found.append(Entry(info, status.st_size, status.st_mtime, depths[info.key]))
        return sorted(found, key=lambda entry: -entry.used)

    def summary(self, model: str | None = None) -> Summary:
        grouped: dict[Origin, list[Entry]] = {}
        for entry in self.entries(model):
            grouped.setdefault(entry.info.origin, []).append(entry)
        quarantined = self._tier.quarantined()
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
        """Reads every file and checks it against its checksum, or against its signature if there is
        a secret. Files that are not whole chunks go into quarantine. This does not count as use of
        the chunks."""
        counts: Counter[str] = Counter()
        keys = self._keys()
        with (
            Progress(f"verifying {self.path}") as progress,
            progress.step(f"reading {len(keys):,} chunks", len(keys)) as step,
        ):
            for key in keys:
                try:
                    if self._is_beyond_us(key):
                        counts["signed"] += 1
                    else:
                        counts["ok"] += self._read(key) is not None
                except OSError:
                    counts["unreadable"] += 1
                step.advance()
        bad = self._tier.faults.get("corrupt", 0)
        return Verdict(counts["ok"], bad, counts["unreadable"], counts["signed"])

    def clear(self, model: str | None = None) -> int:
        """Removes every chunk, or those of one model, and everything in quarantine; returns how
        many files there were. Raises ``CacheFolderError`` if some could not be removed."""
        with self._alone():
            self._look()
            keys = self._keys() if model is None else [info.key for info in self._of(model)]
            count = len(keys) + len(self._tier.quarantined())
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
        """Writes chunks into a ``.tar`` file: all, those of one model, or one chunk and those
        before it. Each is checked first. ``target`` appears when it is complete."""
        target = Path(target).expanduser()
        infos = self._of(model) if key is None else self._path_to(key, self._of(model))
        if beyond := sum(self._is_beyond_us(info.key) for info in infos):
            raise ConfigError(
                f"{beyond} of {len(infos)} chunks in {str(self.path)!r} are signed and cannot be "
                "checked; set KVBOOST_CACHE_SECRET to the secret that they were signed with"
            )
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
        """Installs the chunks of an exported file. Each is checked before it is written, and any
        member that is not a chunk is refused. Existing chunks stay; chunks that do not fit into the
        budget are left out.

        A checksum proves that a chunk is whole, not where it is from: without a secret, the author
        of the file chooses what the model will believe to have read.
        """
        source = Path(source).expanduser()
        counts: Counter[str] = Counter()
        left_out: set[ChunkKey] = set()
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
                f"{counts['installed']} chunks were installed before that; name a file that "
                "`kvboost cache export` wrote, or export it again"
            ) from error
        self._look()
        names = ("installed", "present", "refused", "no_room")
        return Imported(**{name: counts[name] for name in names})

    def forget(self, text: str, tokenizer: Tokenizer) -> int:
        """Removes every chunk that contains ``text`` (of a long text: 32 consecutive tokens), every
        chunk that follows one of those, and everything in quarantine; returns how many chunks there
        were. Raises ``ForgetError`` if some of it may be left. Running engines keep what they hold
        in memory."""
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
                f"{len(keys)} chunks contain this text; of these and of quarantine, {left} files "
                f"could not be removed from {str(self.path)!r}, and {unknown} files could not be "
                "read; see that they can be read and written, and call again"
            )
        return len(keys)

    def models(self) -> list[str]:
        """Names of the models whose chunks are here."""
        return sorted({info.origin.name for info in self._infos.values()})

    def _look(self) -> None:
        """Notices how the folder has changed."""
        changes = self._tier.refresh(now=True)
        self._infos |= {info.key: info for info in changes.added}
        for key in changes.gone:
            self._infos.pop(key, None)

    def _file(self, key: ChunkKey) -> Path:
        return self.path / _member_name(key)

    def _keys(self) -> list[ChunkKey]:
        """The keys of everything that is named like a chunk, in folders that are no links."""
        shards = [path for path in self.path.glob("??") if path.is_dir() and not path.is_symlink()]
        names = (f"{shard.name}/{path.name}" for shard in shards for path in shard.iterdir())
        return [ChunkKey(match[2]) for name in names if (match := _MEMBER.fullmatch(name))]

    def _is_beyond_us(self, key: ChunkKey) -> bool:
        """Whether a chunk is signed and there is no secret to check it with."""
        info = self._infos.get(key)
        return info is not None and info.signed and self._secret is None

    def _of(self, model: str | None) -> list[ChunkInfo]:
        """The chunks of a model, chosen by its name or by the beginning of its fingerprint."""
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
        return [*found, *preceding(self._infos, found[0], parents=True)]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process or thread writes meanwhile."""
        with self._tier.exclusive() as locked:
            if not locked:
                raise CacheFolderError(
                    f"{str(self.path)!r} could not be locked for {LOCK_SECONDS:.0f} s; see that it "
                    "can be written, or wait until other processes have written"
                )
            yield

    def _remove(self, keys: Iterable[ChunkKey]) -> int:
        """Removes chunks and everything in quarantine; returns how many of these files are left."""
        keys = list(keys)
        for key in keys:
            self._tier.delete(key)
        self._tier.clear_quarantine()
        left = [key for key in keys if os.path.lexists(self._file(key))]
        for key in set(keys).difference(left):
            self._infos.pop(key, None)
        return len(left) + len(self._tier.quarantined())

    def _read(self, key: ChunkKey) -> bytes | None:
        """A file's bytes, checked. None if it was removed, or if it is not whole and is in
        quarantine now. Does not count as use."""
        try:
            with open(files.open_regular(self._file(key)), "rb") as file:
                data = file.read()
            if codec.decode(data, self._secret).key == key:
                return data
        except FileNotFoundError:
            return None
        except codec.BadChunk:
            pass
        self._tier.get(key)  # finds the same fault, and puts the file into quarantine
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
        """Installs one member; returns what was done with it. The member's name is only compared
        with the key: the path follows from the key, which follows from the tokens. A chunk without
        room is ``left_out``, and so are those after it: they would be of no use without it."""
        match = _MEMBER.fullmatch(member.name)
        if match is None or not member.isreg() or member.issparse() or member.size > longest:
            return "refused"
        key = ChunkKey(match[2])
        file = archive.extractfile(member)
        assert file is not None  # it is a regular file
        try:
            chunk = codec.decode(file.read(), self._secret)
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
    """Whether a cache is at ``path``, or may be made there. Other folders are never touched,
    because opening a cache removes leftover files."""
    if is_cache_folder(path):
        return True
    return create and (not path.exists() or (path.is_dir() and not any(path.iterdir())))


def _private(path: str, flags: int) -> int:
    """Opens a file that only its owner can read, as the folder."""
    return os.open(path, flags, 0o600)


def _member_name(key: ChunkKey) -> str:
    """The name of a chunk in an archive and in the folder."""
    return f"{key[:2]}/{key}{SUFFIX}"


def _front_to_end(infos: Iterable[ChunkInfo]) -> list[ChunkInfo]:
    """Every chunk after those that it follows."""
    return sorted(infos, key=lambda info: info.base_position)
