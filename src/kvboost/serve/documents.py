"""Documents that clients upload once and then refer to by id. They are read in the background.

Texts are kept in memory, for each tenant and salt separately, also if tenants share a cache. Their
KV is an ordinary part of the cache: it may be evicted and is computed again then, and with a cache
folder the next process finds it there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import kvboost
from kvboost.config import GenerationMode
from kvboost.errors import KVBoostError, QueueFullError
from kvboost.serve.auth import Keys, Place, Tenant
from kvboost.serve.errors import ApiError, from_engine
from kvboost.serve.http.problems import shown
from kvboost.serve.settings import ServerSettings

logger = logging.getLogger("kvboost.serve")

_LONGEST_WAIT = 5
"""Seconds after which a full queue is tried again, whatever it says."""


@dataclass(eq=False)
class Document:
    """One document. ``text`` is as prompts contain it, title included."""

    id: str
    place: Place
    title: str | None
    text: str
    tokens: int
    created: float
    pin: bool = False
    """Whether it is pinned once it is read."""
    name: str | None = None
    """That of its file, if the server starts with it."""
    status: str = "waiting"
    """``waiting``, ``reading``, ``ready`` or ``failed``."""
    error: str | None = None

    @cached_property
    def size(self) -> int:
        """Bytes of its text."""
        return len(self.text.encode())

    def under(self, title: str | None) -> str:
        """The text for a prompt, perhaps under another title."""
        if title is None or title == self.title:
            return self.text
        head = 0 if self.title is None else len(titled("", self.title))
        return titled(self.text[head:], title)

    def describe(self) -> dict[str, Any]:
        same = {name: getattr(self, name) for name in ("id", "title", "tokens", "status", "error")}
        return {**same, "object": "document", "bytes": self.size, "created": int(self.created)}


class Documents:
    """The documents of all tenants. For one event loop."""

    def __init__(self, engine: kvboost.KVBoost, settings: ServerSettings, keys: Keys) -> None:
        self._engine = engine
        self._settings = settings
        self._keys = keys
        self._documents: dict[tuple[Place, str], Document] = {}
        """By place and id."""
        self._unread = _Unread()
        self._reader: asyncio.Task[None] | None = None
        self._warmed, self._to_warm = 0, 0

    @property
    def warming(self) -> tuple[int, int] | None:
        """How many documents of the settings are read, and how many there are; None after all."""
        return None if self._warmed == self._to_warm else (self._warmed, self._to_warm)

    async def start(self) -> None:
        """Begins to read documents: first those of the settings, once for each salt. Without keys
        they belong to all requests, and with a shared cache to every key."""
        tenants = [self._keys.named(name) for name in self._settings.warm_for]
        groups: dict[str, list[Tenant]] = {}
        for tenant in tenants or self._keys.tenants():
            groups.setdefault(tenant.salt(), []).append(tenant)
        self._warmed, self._to_warm = 0, len(self._settings.warm) * len(groups)
        self._reader = asyncio.ensure_future(self._read_all(list(groups.values())))

    async def stop(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)

    def add(
        self, tenant: Tenant, cache_salt: str, text: str, tokens: int, title: str | None = None
    ) -> Document:
        """Keeps a document and reads it in the background. The same document is kept once."""
        made = _make(tenant.place(cache_salt), text, tokens, title)
        found = self._documents.get((made.place, made.id))
        if found is not None and found.status != "failed":
            return found
        self._check_room(made)
        self._documents[made.place, made.id] = made
        self._unread.put(made)
        return made

    def get(self, place: Place, document_id: str) -> Document:
        """Raises ApiError 404 if there is no such document at ``place``."""
        found = self._documents.get((place, document_id))
        if found is None:
            said = f"there is no document {shown(document_id)} under this key and cache_salt"
            said += "; POST /kvboost/documents uploads one and returns its id"
            raise ApiError(404, said, "document_not_found", "document_id")
        return found

    def all(self, place: Place) -> list[Document]:
        """The documents at ``place``, the oldest first."""
        return [one for (kept_at, _), one in self._documents.items() if kept_at == place]

    def texts_of(self, owner: str) -> list[tuple[str, str]]:
        """The names and texts of all documents of an owner."""
        return [
            (one.name or one.title or one.id, one.text)
            for (place, _), one in self._documents.items()
            if place.owner == owner
        ]

    async def delete(self, place: Place, document_id: str) -> None:
        """Forgets the text. Its KV stays in the cache until it is evicted."""
        document = self.get(place, document_id)
        del self._documents[place, document_id]
        self._unread.discard(document)
        if document.pin and document not in self._documents.values():
            await asyncio.to_thread(self._engine.unpin, document.text, cache_salt=place.salt)

    def keep_only(self, owners: Collection[str]) -> None:
        """Forgets the texts of all other tenants. What is pinned stays so."""
        for (place, document_id), document in list(self._documents.items()):
            if place.owner not in owners:
                del self._documents[place, document_id]
                self._unread.discard(document)

    def _check_room(self, new: Document) -> None:
        """Raises ApiError 409 if there is no room for ``new``. It may replace one that failed."""
        owner, replaced = new.place.owner, (new.place, new.id)
        own = [
            one for key, one in self._documents.items() if key[0].owner == owner and key != replaced
        ]
        most, most_bytes = self._settings.max_documents, self._settings.max_document_bytes
        held, size = sum(one.size for one in own), new.size
        if len(own) >= most or held + size > most_bytes:
            kept = f"{len(own):,} documents with {held:,} bytes are kept"
            allowed = f"a key may keep {most:,} with {most_bytes:,} bytes: delete some"
            said = f"the document has {size:,} bytes, and {kept}; {allowed}"
            raise ApiError(409, said, "documents_full", "text")

    async def _read_all(self, groups: Sequence[Sequence[Tenant]]) -> None:
        for tenants in groups:
            for name, text in self._settings.warm:
                await self._warm(tenants, name, text)
            await self._warm_later(tenants[0])
        while True:
            await self._read(await self._unread.take())

    async def _warm(self, tenants: Sequence[Tenant], name: str, text: str) -> None:
        """Reads a document of the settings for ``tenants`` of one salt; says how it went."""
        try:
            ids = await asyncio.to_thread(self._engine.encode, text)
            document = _make(tenants[0].place(), text, len(ids), pin=self._settings.pin)
            document.name = name
            for tenant in tenants:
                self._documents.setdefault((tenant.place(), document.id), document)
            await self._read(document)
        finally:
            self._warmed += 1
        done = f"{self._warmed} of {self._to_warm}"
        if document.error is not None:
            logger.warning("warmed %s: %s cannot be read: %s", done, name, document.error)
        else:
            pinned = ", pinned" if document.pin else ""
            logger.info("warmed %s: %s (%s tokens%s)", done, name, f"{len(ids):,}", pinned)

    async def _warm_later(self, tenant: Tenant) -> None:
        """Leaves the documents that the server starts with to idle time, in further contexts."""
        contexts, texts = self._settings.warm_contexts, [text for _, text in self._settings.warm]
        is_moved = self._settings.mode == GenerationMode.CHUNK_KV_REUSE.value
        if contexts == 1 or len(texts) < 2 or not is_moved:
            return
        salt = tenant.salt()
        try:
            waiting = await asyncio.to_thread(
                self._engine.warm_later, texts, contexts=contexts, cache_salt=salt
            )
        except KVBoostError as error:
            logger.warning("documents will not be read in other contexts: %s", error)
        except Exception:  # a defect; other documents are read nevertheless
            logger.exception("documents will not be read in other contexts")
        else:
            logger.info("%d readings in other contexts wait for idle time", waiting)

    async def _read(self, document: Document) -> None:
        document.status = "reading"
        try:
            await self._read_when_possible(document)
            document.status = "ready"
        except (KVBoostError, ApiError) as error:
            document.status, document.error = "failed", from_engine(error).message
        except Exception:  # a defect; the other documents are read nevertheless
            logger.exception("a document could not be read")
            document.status, document.error = "failed", "the server failed on this document"

    async def _read_when_possible(self, document: Document) -> None:
        while True:
            try:
                if document.pin:
                    await self._engine.apin(document.text, cache_salt=document.place.salt)
                else:
                    await self._engine.awarm(document.text, cache_salt=document.place.salt)
                return
            except QueueFullError as error:
                await asyncio.sleep(min(error.retry_after, _LONGEST_WAIT))


class _Unread:
    """Documents to read. Tenants take turns, so that one with many delays no other."""

    def __init__(self) -> None:
        self._by_owner: dict[str, list[Document]] = {}
        """The tenant that is next comes first."""
        self._has_some = asyncio.Event()

    def put(self, document: Document) -> None:
        self._by_owner.setdefault(document.place.owner, []).append(document)
        self._has_some.set()

    def discard(self, document: Document) -> None:
        """Removes a document, if it is still here."""
        owner = document.place.owner
        rest = [one for one in self._by_owner.get(owner, ()) if one is not document]
        if rest:
            self._by_owner[owner] = rest
        else:
            self._by_owner.pop(owner, None)

    async def take(self) -> Document:
        """Removes and returns the next document; waits until there is one."""
        while not self._by_owner:
            self._has_some.clear()
            await self._has_some.wait()
        owner, (document, *rest) = next(iter(self._by_owner.items()))
        del self._by_owner[owner]
        if rest:
            self._by_owner[owner] = rest
        return document


def _make(
    place: Place, text: str, tokens: int, title: str | None = None, pin: bool = False
) -> Document:
    text = titled(text, title)
    digest = blake2b(text.encode(), digest_size=12, person=b"kvboost-doc")
    number = f"doc_{digest.hexdigest()}"
    return Document(number, place, title or None, text, tokens, time.time(), pin)


def titled(text: str, title: str | None) -> str:
    """A text under its title. The blank line lets chunks end there (``chunking="document"``), so
    that the text is cut alike under any title."""
    return f"{title}\n\n{text}" if title else text
