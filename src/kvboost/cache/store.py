"""The chunk store: lookup with pins, fetching, admission, forgetting.

Three locks, acquired in this order. ``_forgetting`` lets one call at a time remove chunks for good,
which may take as long as disks and networks do; no request waits for it. ``_admission`` lets one
request at a time bring chunks in: its copies delay no lookup, and identical requests store once.
``_lock`` guards the holdings. The last two are held for a few milliseconds at most (the search of a
long prompt, the rows of a request), and never while the network or another process is waited for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

from kvboost.cache.admission import Admission, Pack
from kvboost.cache.chunk import ChunkInfo, Origin
from kvboost.cache.departed import gone_rows
from kvboost.cache.eviction.learned import LearnedPolicy
from kvboost.cache.eviction.policy import EvictionPolicy
from kvboost.cache.holdings import Holdings, StoreListener
from kvboost.cache.lookup.anchors import WINDOW
from kvboost.cache.lookup.catalogue import holding
from kvboost.cache.lookup.hits import EarlyLookup, Hit, KnownRows
from kvboost.cache.mixed import AnyFormat
from kvboost.cache.parts import Cut, Naming
from kvboost.cache.quantize import KVData
from kvboost.cache.remote_lookup import RemoteLookup
from kvboost.cache.states import KnownStates
from kvboost.cache.tiers.open import Tiers
from kvboost.cache.tiers.stats import StoreStats
from kvboost.cache.tiers.transfers import Transfers
from kvboost.errors import ForgetError
from kvboost.results import Pin
from kvboost.results.explaining import SHOWN_TOKENS, Traces
from kvboost.tokens.hashing import ChunkKey, TokenIds

DROPPED_AT_ONCE = 64
"""Chunks that are forgotten while the lock is held: some milliseconds."""
MOST_ROOTS_TRACED = 64
"""Other roots in which an explanation looks for text."""


class ChunkLost(Exception):
    """A chunk that was found is not available any more: the prompt must be planned again."""


class ChunkStore:
    def __init__(
        self,
        tiers: Tiers,
        *,
        cut: Cut,
        origin: Origin,
        format: AnyFormat | None = None,
        window: int = WINDOW,
        policy: Callable[[], EvictionPolicy] = LearnedPolicy,
        attention_share: float = 0.0,
        max_pinned_bytes: int | None = None,
        state_every: int | None = None,
    ) -> None:
        """``origin`` names the model. Other models' chunks in a shared folder only take room.
        ``format`` is the shape of the model's KV; chunks from slow tiers that differ from it are
        refused. ``attention_share`` is the cost of attending to one token, in rows computed: chunks
        late in a text cost more to compute.
        ``max_pinned_bytes`` bounds what :meth:`pin` protects. ``state_every``: for a model with
        states, which are stored at multiples of so many rows at least; a lookup then ends where
        states are stored."""
        secret = b"" if tiers.secret is None else tiers.secret.naming
        self._secret = secret
        self._naming = Naming(cut, origin, secret=secret, state_every=state_every)
        self.holdings = holdings = Holdings(
            tiers,
            self._naming,
            window=window,
            policy=policy,
            attention_share=attention_share,
            max_pinned_bytes=max_pinned_bytes,
            state_every=state_every,
        )
        self._has_states = state_every is not None
        self.epoch = 0
        """Changes when something is forgotten."""
        self._closed = False
        self.lock = threading.RLock()
        self._admission = threading.Lock()
        self._forgetting = threading.Lock()
        self.transfers = Transfers(tiers, holdings.residency, self.lock, format)
        self._remote: RemoteLookup | None = None
        if tiers.remote is not None:
            self._remote = RemoteLookup(
                tiers.remote,
                self._naming,
                holdings.catalogue,
                holdings.on_found_in_remote,
                self.lock,
            )
        self.transfers.open()

    def listen(self, listener: StoreListener, root: ChunkKey) -> None:
        """Tells ``listener`` of exact chunks of ``root`` that requests store or use, and of every
        chunk that is gone."""
        with self.lock:
            self.holdings.listen(listener, root)

    @property
    def fastest_tier(self) -> str:
        return self.holdings.residency.fastest

    @property
    def used_share(self) -> float:
        """The share of the memory that is taken: the host's, or a GPU's if that is fuller."""
        with self.lock:
            return self.holdings.residency.used_share

    def __contains__(self, key: ChunkKey) -> bool:
        """Whether a chunk is in some tier."""
        with self.lock:
            holdings = self.holdings
            return key in holdings.catalogue and holdings.residency.where(key) is not None

    @contextmanager
    def lookup(
        self,
        root: ChunkKey,
        token_ids: TokenIds,
        *,
        moved_before: int = 0,
        repair: str = "",
        pin: bool = True,
        ask_remote: bool = True,
        edges: Sequence[int] = (),
        lag_of: Callable[[int], int] | None = None,
        early: EarlyLookup | None = None,
    ) -> Iterator[KnownRows]:
        """The stored rows for ``token_ids``, pinned until the context is left: the exact prefix,
        and with ``moved_before`` also the approximate rows that continue it (repaired as ``repair``
        says) and, for rows before ``moved_before``, the same text cached at other positions.

        Call ``touch`` for what is used. With ``pin=False`` nothing is pinned. With
        ``ask_remote=False`` the remote store is not asked, because it may claim to have a chunk
        and then not deliver it. ``lag_of`` gives ``ChunkInfo.lag`` of a row, which changes at
        ``edges``: no stored chunk crosses one. What was found ``early`` for the same prompt is
        returned if it still holds.
        """
        self.transfers.refresh()

        def match() -> KnownRows:
            return self.holdings.match(root, token_ids, moved_before, repair, early)

        in_remote: list[ChunkKey] = []
        if ask_remote and self._remote is not None:
            in_remote = self._remote.ask(*(root, token_ids, moved_before, match, edges, lag_of))
        with self.lock:
            known = match()
            keys = list(known.keys()) if pin else []
            self.holdings.in_use.update(keys)
        try:
            yield known
        finally:
            with self.lock:
                self.holdings.release(keys)
                self.holdings.residency.drop_unfetched([*in_remote, *keys])

    def look_early(
        self, root: ChunkKey, token_ids: TokenIds, *, moved_before: int = 0, repair: str = ""
    ) -> EarlyLookup | None:
        """Looks up what is stored for ``token_ids`` now, for a :meth:`lookup` that comes later.
        Pins nothing and waits for no file. None if a remote store must be asked, and for a model
        with states, which go while their chunks stay."""
        if self._remote is not None or self._has_states:
            return None
        with self.lock:
            known = self.holdings.match(root, token_ids, moved_before, repair)
            return EarlyLookup(known, self.holdings.catalogue.newest)

    def following(
        self, root: ChunkKey, in_place: Sequence[Hit], token_ids: TokenIds, count: int
    ) -> TokenIds:
        """The next ``count`` tokens, as far as there are any, of the cached text that begins with
        the ``in_place`` hits of a prompt. Where it branches, of the branch that shares most with
        the prompt."""
        with self.lock:
            found = self.holdings.catalogue.following(root, in_place, token_ids, count)
        return found[:count]

    def trace(
        self,
        token_ids: TokenIds,
        root: ChunkKey,
        *,
        at: float,
        row: int,
        path: Sequence[tuple[ChunkKey, int]],
        donors: Sequence[tuple[ChunkKey, int]],
        elsewhere: bool,
        other_salts: bool,
    ) -> Traces:
        """The facts for an explanation of a prompt that was planned at the time ``at``.
        ``row``: the first one that was not found in place; ``path``: the chunks that served the
        rows before it, and where they end; ``donors``: chunks that were moved, and their first
        token. ``elsewhere`` looks for its text at other positions, ``other_salts`` under other
        roots."""
        with self.lock:
            catalogue = self.holdings.catalogue
            left = self.holdings.departed.until(at)
            before = [tuple(catalogue.before(*one, SHOWN_TOKENS).tolist()) for one in donors]
            used = {key for key, _ in path}
            places = catalogue.elsewhere(root, token_ids, row, used) if elsewhere else []
        under_others: list[tuple[int, int]] = []
        for other in sorted(self.roots() - {root})[:MOST_ROOTS_TRACED] if other_salts else ():
            with self.lock:
                under_others += catalogue.known_under(other, token_ids, row)
        gone = gone_rows(left, [(root, 0), *path], token_ids, self._secret)
        return Traces(tuple(gone), tuple(places), tuple(under_others), tuple(before))

    def fetch(self, hits: Sequence[Hit]) -> Iterator[tuple[Hit, KVData]]:
        """The data of pinned hits, in order. Slow tiers are read ahead. A chunk that is not
        available, or is not what the hit says, is forgotten and raises ``ChunkLost``."""
        chunks = self.transfers.fetch([hit.chunk for hit in hits])
        for hit, chunk in zip(hits, chunks, strict=True):
            if chunk is None:
                raise ChunkLost(hit.chunk.key)
            yield hit, chunk.data

    def at_hand(self, hits: Sequence[Hit]) -> list[KVData]:
        """The data of the first of pinned ``hits`` that are in the fastest tier."""
        with self.lock:
            residency = self.holdings.residency
            tier = residency.fastest
            here = takewhile(lambda hit: hit.tier == tier, hits)
            chunks = residency.at_hand([hit.chunk.key for hit in here])
            return [chunk.data for chunk in chunks or ()]

    def count_hits(self, number: int) -> None:
        """So many chunks of the fastest tier served a request without being fetched."""
        with self.lock:
            self.holdings.residency.hits[self.fastest_tier] += number

    def touch(self, *paths: Sequence[Hit]) -> None:
        """A request uses these hits, each path from its first chunk to its last: they are evicted
        later."""
        with self.lock:
            self.holdings.residency.touch(*([hit.chunk.key for hit in path] for path in paths))

    def admit(
        self,
        root: ChunkKey,
        token_ids: TokenIds,
        pack: Pack,
        *,
        exact_rows: int,
        repair: str = "",
        boundaries: Sequence[int] = (),
        epoch: int | None = None,
        wait: bool = True,
        grows: bool = False,
        states: KnownStates | None = None,
        lag_of: Callable[[int], int] | None = None,
    ) -> int:
        """Keeps the KV of ``token_ids``, which begin a sequence; returns how many chunks are new.

        The first ``exact_rows`` are exact. The others were computed on top of moved rows: they go
        into a branch beside the exact tree, starting with the chunk in which they begin.

        Known chunks are skipped; a new chunk replaces a shorter one that it continues. When the
        budget is full of pinned chunks, or a copy fails, the rest is left out: the beginning of a
        text is worth more than its end. Nothing is kept of a request from an earlier ``epoch``,
        before something was forgotten: it may contain that text. Without ``wait``, nothing is kept
        while another request's chunks are admitted. If the text
        still ``grows``, its last chunk is left out: a longer one would soon replace it.
        ``states``: where they are known, of a model that has some. What earlier turns of the same
        conversation have left is dropped. ``lag_of`` gives ``ChunkInfo.lag`` of a row;
        ``boundaries`` are then where it changes.
        """
        if not self._admission.acquire(blocking=wait):
            return 0
        try:
            if self._closed or epoch not in (None, self.epoch):
                return 0
            places = self._naming.places(
                root,
                token_ids,
                exact_rows=exact_rows,
                repair=repair,
                boundaries=boundaries,
                states=states,
                lag_of=lag_of,
            )
            if grows:
                places = takewhile(lambda place: place.part.end < len(token_ids), places)
            turns = frozenset[int]() if states is None else states.turns
            admission = Admission(self.holdings, self.transfers, self._naming, self.lock, turns)
            try:
                return admission.run(places, pack)
            finally:
                with self.lock:
                    if states is not None:
                        self.holdings.drop_states(admission.path, states.since)
                    self.holdings.announce(root, token_ids)
        finally:
            self._admission.release()

    def drop_superseded(self, root: ChunkKey, token_ids: TokenIds, repair: str) -> int:
        """Drops the approximate copies (repaired as ``repair`` says) of text that is known exactly
        now: ``token_ids``, which begin a sequence. Copies in use stay, and so do those that a chunk
        with other text continues. Returns how many were dropped."""
        with self._admission:
            with self.lock:
                dropped = self.holdings.drop_superseded(root, token_ids, repair)
            self.transfers.remove_files(dropped)
        return len(dropped)

    def most_valuable(self, limit: int) -> list[dict[str, Any]]:
        """The chunks in RAM that would be evicted last, the very last one first."""
        with self.lock:
            return self.holdings.most_valuable(limit)

    def pin(
        self,
        name: str,
        root: ChunkKey,
        token_ids: TokenIds,
        *,
        repair: str = "",
        ttl: float | None = None,
    ) -> Pin:
        """Keeps what is cached of ``token_ids``, from their first one on, from being evicted by any
        tier of this machine, for ``ttl`` seconds or for ever. Computes nothing.

        This replaces what ``name`` pinned before: the same call renews a pin and lets it grow with
        a conversation. Raises PinError if ``max_pinned_bytes`` is too small; the earlier pin then
        stays."""
        with self.lock:
            return self.holdings.pin(name, root, token_ids, repair=repair, ttl=ttl)

    def unpin(self, name: str) -> Pin | None:
        """Ends a pin; returns what it was, or None if there is none of that name."""
        with self.lock:
            return self.holdings.unpin(name)

    def pins(self) -> list[Pin]:
        """All pins, in the order in which they end."""
        with self.lock:
            return self.holdings.pins()

    def forget_text(self, texts: Sequence[TokenIds]) -> int:
        """Forgets every chunk that contains a piece of ``texts`` or follows such a chunk, in use or
        not, for good and on every tier; returns how many there were. Raises ``ForgetError`` if some
        could not be removed. What requests are computing now is not kept."""
        return self._forget(lambda infos: holding(infos, texts))

    def forget(self, *roots: ChunkKey) -> int:
        """The same for every chunk of ``roots``."""
        return self._forget(lambda infos: [key for key in infos if infos[key].root in roots])

    def _forget(self, choose: Callable[[Mapping[ChunkKey, ChunkInfo]], list[ChunkKey]]) -> int:
        """Forgets what ``choose`` picks, here and in the remote store."""
        with self._forgetting:
            self._begin_epoch()
            self.transfers.refresh(now=True)
            with self.lock:
                here = self.holdings.catalogue.infos()
            listed = self.transfers.list_remote()
            in_remote = {info.key: info for info in listed.infos}
            # Together: a chunk that came as moved text has its beginning in the remote store only.
            keys = choose({**in_remote, **here})
            left = self._remove(keys)
            # Requests that were planned meanwhile may have used these chunks, or have read the text
            # again: nothing of them is kept from now on, and what they have brought in is removed.
            self._begin_epoch()
            with self.lock:
                now = self.holdings.catalogue.infos()
            if now.keys() - (here.keys() - set(keys)):
                more = [key for key in choose({**in_remote, **now}) if key in now]
                if more:
                    keys = list(dict.fromkeys([*keys, *more]))
                    left = self._remove(keys)
        if left:
            places = " and ".join(f"{count} in {place}" for place, count in left.items())
            raise ForgetError(
                f"{len(keys)} chunks were to be forgotten, but could not all be removed: {places} "
                "may be left; see that it can be written and call again"
            )
        if listed.problem:
            raise ForgetError(
                f"{len(keys)} chunks are forgotten, but others may be left: {listed.problem}"
            )
        return len(keys)

    def _remove(self, keys: Sequence[ChunkKey]) -> dict[str, int]:
        """Removes chunks from every tier, for good; returns how many are left, by tier."""
        self._drop(keys)
        with self.lock:
            self.holdings.settle_pins()
        self.transfers.await_writing()
        return self.transfers.purge(keys)

    def _begin_epoch(self) -> None:
        """From now on nothing is kept of requests that were planned before. No admission is under
        way when this returns."""
        with self._admission:
            self.epoch += 1

    def _drop(self, keys: Sequence[ChunkKey]) -> None:
        """Takes chunks out of memory and out of the books, some at a time: requests and pins wait
        for the lock."""
        for start in range(0, len(keys), DROPPED_AT_ONCE):
            with self.lock:
                self.holdings.drop(keys[start : start + DROPPED_AT_ONCE], "forgotten")

    def roots(self) -> set[ChunkKey]:
        """The roots of all chunks."""
        with self.lock:
            return {info.root for info in self.holdings.catalogue.infos().values()}

    def free_gpu(self, is_enough: Callable[[], bool]) -> None:
        """Evicts chunks from the GPU until that ``is_enough``, or no other may go; a few at a
        time, between which other threads have their turn."""
        while not is_enough():
            with self.lock:
                if not self.holdings.residency.free_gpu():
                    return
            time.sleep(0)

    def leave_memory(self, roots: Collection[ChunkKey]) -> int:
        """Takes the chunks of these roots out of memory, except those in use; returns how many.
        What is on disk, or waits to be written there, stays."""
        with self.lock:
            infos = self.holdings.catalogue.infos().values()
            leaving = [info for info in infos if info.root in roots]
            return self.holdings.residency.leave_memory(leaving)

    def clear(self) -> None:
        """Forgets everything that is not in use right now, on every tier of this machine."""
        with self._forgetting:
            self._begin_epoch()
            self.transfers.refresh(now=True)
            with self.lock:
                in_use = self.holdings.in_use
                keys = [key for key in self.holdings.catalogue if key not in in_use]
            self._drop(keys)
            with self.lock:
                self.holdings.settle_pins()
                self.holdings.announce_cleared()
            self.transfers.await_writing()
            self.transfers.remove_files(keys)

    def flush(self) -> None:
        """Writes what is not written yet."""
        self.transfers.flush()

    def close(self) -> None:
        """Writes what is not written yet and releases everything."""
        with self._forgetting, self._admission:
            self._closed = True
            self.transfers.close()
            with self.lock:
                self.holdings.catalogue.clear()

    def stats(self) -> StoreStats:
        remote = self.transfers.remote_stats()
        with self.lock:
            return self.holdings.stats(remote)

    def check_integrity(self) -> list[str]:
        """The inconsistencies between catalogue, tiers and pins; empty when all is well."""
        with self._forgetting, self._admission, self.transfers.quiet(), self.lock:
            return [] if self._closed else self.holdings.check_integrity()
