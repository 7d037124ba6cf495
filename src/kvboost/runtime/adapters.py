"""The adapters of an engine, by name, and what is cached of each."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kvboost.cache.store import ChunkStore
from kvboost.errors import AdapterError, UnknownAdapterError
from kvboost.model.adapters.adapter import Adapter, AppliedAdapter
from kvboost.model.adapters.files import read_adapter
from kvboost.model.execution.forward import Forward
from kvboost.results import LONGEST_ADAPTER_NAME, AdapterInfo
from kvboost.tokens.hashing import ChunkKey, TokenIds

MOST_ROOTS = 1024
"""Roots that are remembered of one adapter before those that hold nothing are left out."""

RootOf = Callable[[str, str], ChunkKey]
"""The root key for a salt and the digest of an adapter."""


@dataclass(frozen=True)
class _Loaded:
    info: AdapterInfo
    adapter: Adapter


class Adapters:
    """The loaded adapters of an engine, by name. Thread-safe. A request holds the adapter that it
    began with, whatever its name means later."""

    def __init__(
        self, forward: Forward, store: ChunkStore, root_of: RootOf, refusal: str | None = None
    ) -> None:
        """``refusal``: why this engine takes no adapters."""
        self._forward = forward
        self._store = store
        self._root_of = root_of
        self._refusal = refusal
        self._loaded: dict[str, _Loaded] = {}
        self._roots: dict[str, set[ChunkKey]] = {}
        """By digest, of all adapters that this engine has ever had."""
        self._lock = threading.Lock()

    def load(
        self, name: str, path: str | os.PathLike[str], *, in_place: bool = False
    ) -> AdapterInfo:
        """Loads the adapter in the folder ``path`` under ``name``. ``in_place`` replaces one of
        that name."""
        if self._refusal is not None:
            raise AdapterError(self._refusal)
        if not isinstance(name, str) or not name or len(name) > LONGEST_ADAPTER_NAME:
            raise AdapterError(
                f"the name {name!r} must be text of 1 to {LONGEST_ADAPTER_NAME} characters"
            )
        self._refuse_taken(name, in_place)
        files = read_adapter(path)
        adapter = self._forward.load_adapter(files)
        folder = str(Path(path).expanduser().absolute())
        info = AdapterInfo(
            name,
            folder,
            adapter.digest,
            adapter.rank,
            len(adapter.deltas),
            adapter.num_bytes,
            bool(adapter.invocation),
        )
        with self._lock:
            self._refuse_taken(name, in_place)
            replaced = self._loaded.get(name)
            self._loaded[name] = _Loaded(info, adapter)
            self._roots.setdefault(adapter.digest, set())
        if replaced is not None:
            self._leave_memory(replaced.adapter)
        return info

    def unload(self, name: str) -> AdapterInfo:
        """Requests that run go on with it; later ones cannot name it. What is cached of it leaves
        the memory and stays on disk."""
        found = self._get(name)
        with self._lock:
            if self._loaded.get(name) is found:
                del self._loaded[name]
        self._leave_memory(found.adapter)
        return found.info

    def applied(self, name: str | None, token_ids: TokenIds) -> AppliedAdapter | None:
        """The adapter ``name`` as it applies to a prompt; None if no adapter is named."""
        return None if name is None else self._get(name).adapter.applied_to(token_ids)

    def infos(self) -> dict[str, AdapterInfo]:
        with self._lock:
            return {name: loaded.info for name, loaded in self._loaded.items()}

    def is_loaded(self, adapter: Adapter) -> bool:
        """Whether requests can name an adapter of the same content."""
        with self._lock:
            return any(one.adapter.digest == adapter.digest for one in self._loaded.values())

    def root(self, salt: str, applied: AppliedAdapter | None) -> ChunkKey:
        """The root of what a request with this salt and adapter may share. Only base rows are
        cached of a request with an activated adapter."""
        if applied is None or applied.is_activated:
            return self._root_of(salt, "")
        digest = applied.adapter.digest
        root = self._root_of(salt, digest)
        with self._lock:
            roots = self._roots.setdefault(digest, set())
            if root not in roots and len(roots) >= MOST_ROOTS:
                roots &= self._store.roots()
            roots.add(root)
        return root

    def roots_of_salt(self, salt: str) -> list[ChunkKey]:
        """The roots of a salt: with no adapter, and with each that this engine has ever had."""
        with self._lock:
            digests = ["", *self._roots]
        return [self._root_of(salt, digest) for digest in digests]

    def _get(self, name: str) -> _Loaded:
        with self._lock:
            if name in self._loaded:
                return self._loaded[name]
            known = ", ".join(map(repr, self._loaded)) or "none"
        raise UnknownAdapterError(
            f"there is no adapter {name!r}; loaded: {known}. Load it with engine.load_adapter"
        )

    def _refuse_taken(self, name: str, in_place: bool) -> None:
        if name in self._loaded and not in_place:
            raise AdapterError(
                f"an adapter {name!r} is loaded already; unload it, choose another name, or "
                "replace it with in_place=True"
            )

    def _leave_memory(self, adapter: Adapter) -> None:
        if not self.is_loaded(adapter):
            with self._lock:
                roots = set(self._roots[adapter.digest])
            self._store.leave_memory(roots)
