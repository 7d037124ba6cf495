"""A cache folder seen from outside: listing, verifying, removing, exporting and importing chunks.
No model is needed, and engines may use the folder meanwhile."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvboost.cache import codec
from kvboost.cache.archive import (
    Exported,
    Imported,
    key_in,
    member_name,
    read_archive,
    write_archive,
)
from kvboost.cache.chunk import ChunkInfo, KVChunk, Origin
from kvboost.cache.lookup.catalogue import holding, preceding
from kvboost.cache.secret import Secret
from kvboost.cache.tiers import files
from kvboost.cache.tiers.disk import LOCK_SECONDS, DiskTier
from kvboost.cache.tiers.disk_folder import is_cache_folder
from kvboost.errors import CacheFolderError, ConfigError, ForgetError
from kvboost.progress import Progress
from kvboost.tokens.hashing import ChunkKey
from kvboost.tokens.prompt import PromptReader
from kvboost.tokens.text import Tokenizer


@dataclass(frozen=True)
class Entry:
    """One chunk in the folder."""

    info: ChunkInfo
    nbytes: int
    """Size of its file."""
    used: float
    """When it was last written or read, in seconds since 1970."""
    depth: int
    """The number of chunks of the folder that precede it, each following the last."""


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
    others: int
    """Chunks that another version of KVBoost wrote."""
    other_bytes: int

    @property
    def chunks(self) -> int:
        return sum(model.chunks for model in self.models)

    @property
    def tokens(self) -> int:
        return sum(model.tokens for model in self.models)

    @property
    def nbytes(self) -> int:
        """Size of all files, quarantine and other versions' chunks included."""
        ours = sum(model.nbytes for model in self.models)
        return ours + self.quarantined_bytes + self.other_bytes


@dataclass(frozen=True)
class Verdict:
    ok: int
    bad: int
    """Files that are not whole chunks; they are in quarantine now."""
    unreadable: int
    """Files that the system does not let us read; they stay where they are."""
    signed: int = 0
    """Signed chunks that cannot be checked, because no secret was given."""
    other_version: int = 0
    """Chunks that another version of KVBoost wrote; they stay where they are, unchecked."""

    def __bool__(self) -> bool:
        return not (self.bad or self.unreadable or self.signed or self.other_version)


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
        others = self._tier.others() if model is None else {}
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
            len(others),
            sum(others.values()),
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
        bad, others = self._tier.faults.get("corrupt", 0), len(self._tier.others())
        return Verdict(counts["ok"], bad, counts["unreadable"], counts["signed"], others)

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
        keys = [info.key for info in _front_to_end(infos)]
        return write_archive(target, f"exporting {self.path}", keys, self._read_if_whole)

    def install(self, source: str | os.PathLike[str]) -> Imported:
        """Installs the chunks of an exported file. Each is checked before it is written, and any
        member that is not a chunk is refused. Existing chunks stay; chunks that do not fit into the
        budget are left out.

        A checksum proves that a chunk is whole, not where it is from: without a secret, the author
        of the file chooses what the model will believe to have read.
        """
        left_out: set[ChunkKey] = set()
        source = Path(source).expanduser()
        found = read_archive(source, self._secret, lambda chunk: self._put(chunk, left_out))
        self._look()
        return found

    def forget(self, text: str, tokenizer: Tokenizer) -> int:
        """Removes every chunk that contains ``text`` (of a long text: 32 consecutive tokens), every
        chunk that follows one of those, and what cannot be searched: files in quarantine and other
        versions' chunks. Returns how many chunks there were. Raises ``ForgetError`` if some of it
        may be left. Running engines keep what they hold in memory."""
        texts = PromptReader(tokenizer, vocab_size=0).inside(text)
        with self._alone():
            self._look()
            keys = holding(self._infos, texts)
            self._tier.remove_others()
            others = self._tier.others()
            unknown = len(set(self._keys()) - self._infos.keys() - others.keys())
            left = self._remove(keys) + len(others)
        if left or unknown:
            raise ForgetError(
                f"{len(keys)} chunks contain this text; of these and of what cannot be searched, "
                f"{left} files could not be removed from {str(self.path)!r}, and {unknown} files "
                "could not be read; see that they can be read and written, and call again"
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
        return self.path / member_name(key)

    def _keys(self) -> list[ChunkKey]:
        """The keys of everything that is named like a chunk, in folders that are no links."""
        shards = [path for path in self.path.glob("??") if path.is_dir() and not path.is_symlink()]
        names = (f"{shard.name}/{path.name}" for shard in shards for path in shard.iterdir())
        return [key for name in names if (key := key_in(name)) is not None]

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
            with (
                files.open_regular(self._file(key)) as (descriptor, _),
                open(descriptor, "rb", closefd=False) as file,
            ):
                data = file.read()
            if codec.decode(data, self._secret).key == key:
                return data
        except FileNotFoundError:
            return None
        except codec.BadChunk:
            pass
        self._tier.get(key)  # finds the same fault, and puts the file into quarantine
        return None

    def _read_if_whole(self, key: ChunkKey) -> bytes | None:
        try:
            return self._read(key)
        except OSError:
            return None

    def _put(self, chunk: KVChunk, left_out: set[ChunkKey]) -> str:
        """Installs one chunk; returns what was done with it. One without room is ``left_out``, and
        so are those after it: they would be of no use without it."""
        with self._alone():
            self._tier.refresh(now=True)
            if self._tier.contains(chunk.key) or chunk.key in self._tier.others():
                return "present"
            faults = self._tier.faults
            if chunk.info.parent not in left_out and self._tier.put(chunk):
                return "installed"
            if self._tier.faults == faults:
                left_out.add(chunk.key)
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


def _front_to_end(infos: Iterable[ChunkInfo]) -> list[ChunkInfo]:
    """Every chunk after those that it follows."""
    return sorted(infos, key=lambda info: info.base_position)
