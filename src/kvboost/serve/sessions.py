"""Conversations that keep their KV: what was said last is pinned, for a while after each turn."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import kvboost
from kvboost.errors import KVBoostError
from kvboost.serve.auth import Place
from kvboost.serve.errors import ApiError
from kvboost.serve.http.problems import shown
from kvboost.serve.settings import ServerSettings
from kvboost.tokens.hashing import TokenIds

_UNPINNED = "the session's KV is not pinned"


@dataclass
class Session:
    id: str
    place: Place
    created: float
    expires: float
    """By the clock of the sessions."""
    turns: int = 0
    tokens: int = 0
    bytes: int = 0

    @property
    def pin_name(self) -> str:
        """The name of its pin. It does not reveal the salt."""
        owner, salt = self.place
        digest = blake2b(f"{owner}\0{salt}\0{self.id}".encode(), digest_size=16)
        return f"session-{digest.hexdigest()}"


class Sessions:
    """The sessions of all tenants. Of two turns of one session that end at the same time, the last
    one counts. Thread-safe."""

    def __init__(
        self,
        engine: kvboost.KVBoost,
        settings: ServerSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._clock = clock
        self._sessions: dict[tuple[Place, str], Session] = {}
        """By place and id."""
        self._lock = threading.Lock()
        self._renewing = threading.Lock()
        """Held from the check of ``max_sessions`` until the session is noted."""

    def renew(
        self,
        place: Place,
        session_id: str,
        token_ids: TokenIds,
        ttl: float | None = None,
        adapter: str | None = None,
    ) -> str | None:
        """A turn of a conversation with ``adapter`` has ended: ``token_ids`` are all that was said.
        Pins its KV instead of that of the turn before, for ``ttl`` seconds. Returns why it cannot,
        if so."""
        seconds = self._settings.session_seconds if ttl is None else ttl
        with self._renewing:
            now = self._clock()
            live = self._live()
            session = live.get((place, session_id))
            if session is None:
                own = sum(one.place.owner == place.owner for one in live.values())
                if own >= self._settings.max_sessions:
                    return f"{_UNPINNED}: {own:,} sessions are open, as many as a key may have"
                session = Session(session_id, place, time.time(), now)
            try:
                pin = self._engine.pin_cached(
                    session.pin_name, token_ids, ttl=seconds, cache_salt=place.salt, adapter=adapter
                )
            except KVBoostError as error:
                return f"{_UNPINNED}: {error}"
            if not pin.tokens:
                return f"{_UNPINNED}: nothing of it is in the cache"
            session.turns += 1
            session.expires, session.tokens, session.bytes = now + seconds, pin.tokens, pin.bytes
            with self._lock:
                self._sessions[place, session_id] = session
            return None

    def all(self, place: Place) -> list[dict[str, Any]]:
        return [self._describe(one) for one in self._live().values() if one.place == place]

    def get(self, place: Place, session_id: str) -> dict[str, Any]:
        """Raises ApiError 404 if there is no such session at ``place``."""
        return self._describe(self._find(place, session_id))

    def delete(self, place: Place, session_id: str) -> None:
        """Ends a session: its KV may be evicted from now on."""
        session = self._find(place, session_id)
        with self._lock:
            self._sessions.pop((place, session_id), None)
        self._engine.drop_pin(session.pin_name)

    def keep_only(self, owners: Collection[str]) -> None:
        """Ends the sessions of all other tenants."""
        with self._lock:
            gone = [one for one in self._sessions.values() if one.place.owner not in owners]
            for session in gone:
                del self._sessions[session.place, session.id]
        for session in gone:
            self._engine.drop_pin(session.pin_name)

    def _find(self, place: Place, session_id: str) -> Session:
        found = self._live().get((place, session_id))
        if found is None:
            said = f"there is no session {shown(session_id)} under this key and cache_salt"
            raise ApiError(404, f"{said}; it may have expired", "session_not_found", "session_id")
        return found

    def _live(self) -> dict[tuple[Place, str], Session]:
        """The sessions that have not expired; forgets the others."""
        now = self._clock()
        with self._lock:
            live = {place: one for place, one in self._sessions.items() if one.expires > now}
            self._sessions = live
            return dict(live)

    def _describe(self, session: Session) -> dict[str, Any]:
        same = {name: getattr(session, name) for name in ("id", "turns", "tokens", "bytes")}
        expires_in = round(max(0.0, session.expires - self._clock()), 3)
        created = int(session.created)
        return {**same, "object": "session", "created": created, "expires_in": expires_in}
