"""The chunks of a store: which there are, in which tiers they are, and what keeps them there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from kvboost.cache.chunk import ChunkInfo, KVChunk
from kvboost.cache.departed import Departed
from kvboost.cache.eviction.policy import EvictionPolicy
from kvboost.cache.lookup.catalogue import Catalogue
from kvboost.cache.lookup.hits import EarlyLookup, Hit, KnownRows
from kvboost.cache.parts import Naming, Place
from kvboost.cache.pins import PinnedText, Pins
from kvboost.cache.quantize import NewRows
from kvboost.cache.states import TurnEnds
from kvboost.cache.tiers.open import Tiers
from kvboost.cache.tiers.residency import Residency
from kvboost.cache.tiers.stats import RemoteStats, StoreStats
from kvboost.results import Pin
from kvboost.tokens.hashing import ChunkKey, TokenIds


class StoreListener(Protocol):
    """Is told what becomes of a store's chunks. Called with the store's lock held: a method must
    return at once."""

    def on_stored(self, token_ids: TokenIds, exact: Sequence[Hit]) -> None:
        """A request's rows were admitted. The ``exact`` hits hold the first of ``token_ids``."""

    def on_gone(self, key: ChunkKey) -> None:
        """A chunk has left its last tier."""

    def on_cleared(self) -> None:
        """Everything was forgotten."""


class Holdings:
    """Call every method with the store's lock held; none waits for a file or a network. Owns the
    residency: see :class:`kvboost.cache.tiers.residency.Owner`."""

    def __init__(
        self,
        tiers: Tiers,
        naming: Naming,
        *,
        window: int,
        policy: Callable[[], EvictionPolicy],
        attention_share: float,
        max_pinned_bytes: int | None,
        state_every: int | None = None,
    ) -> None:
        self._naming = naming
        self.catalogue = Catalogue(window, resumes=state_every is not None)
        self.residency = Residency(
            tiers,
            self,
            policy=policy,
            attention_share=attention_share,
            state_every=state_every,
        )
        self.in_use: Counter[ChunkKey] = Counter()
        """Chunks that requests are copying, and how many do."""
        self._kept = Pins(max_pinned_bytes)  # by the user, until unpinned
        self.counts: Counter[str] = Counter()
        self.departed = Departed()
        self._turn_ends = TurnEnds()
        self._listener: StoreListener | None = None
        self._announced_root: ChunkKey | None = None

    def match(
        self,
        root: ChunkKey,
        token_ids: TokenIds,
        moved_before: int = 0,
        repair: str = "",
        early: EarlyLookup | None = None,
    ) -> KnownRows:
        """The stored rows for ``token_ids``: those that were found ``early``, if that still holds.
        Chunks that turn out to be in no tier are marked lost."""
        where_is, asked = self.residency.where, (root, token_ids, moved_before, repair)
        if early is not None and self.catalogue.is_current(early, *asked, where_is):
            return early.known
        lost: list[ChunkKey] = []

        def where(key: ChunkKey) -> str | None:
            tier = where_is(key)
            if tier is None:
                lost.append(key)
            return tier

        known = self.catalogue.match(*asked, where)
        for key in lost:
            self.residency.mark_lost(key)
        return known

    def find_existing(self, place: Place) -> ChunkKey | None:
        """The chunk that holds the part, in use from now on; None if there is none. Sets the
        ``sibling`` of ``place``: the available one that shares most leading tokens."""
        place.sibling, place.common = None, 0
        found = self.catalogue.sibling(place.parent, place.token_ids)
        if found is None:
            return None
        if self.residency.where(found[0]) is None:
            self.residency.mark_lost(found[0])
            return None
        sibling, common = place.sibling, place.common = found
        if not place.is_held_by(self.catalogue.info(sibling), common):
            return None
        self.in_use[sibling] += 1
        return sibling

    def rows_of(self, place: Place) -> NewRows:
        """The rows of a new chunk at ``place``, and a stored chunk that begins alike."""
        ready = None if place.sibling is None else self.residency.ready(place.sibling)
        like = None if ready is None else ready.data
        return NewRows(place.part.start, place.part.end, like, place.common)

    def insert(
        self, chunks: Sequence[KVChunk], turns: frozenset[int] = frozenset()
    ) -> tuple[int, list[ChunkKey]]:
        """Takes new chunks of one sequence in, parents first; turns of a conversation end at
        ``turns``. Returns how many of the first ones
        can be kept, and are in use from now on, and the chunks that they replaced."""
        # A shorter one that becomes useless makes room for those that follow.
        useless = [self._replaced_by(chunk.info) for chunk in chunks]
        others = max((at for at, one in enumerate(useless, 1) if one is not None), default=0)
        new: list[ChunkInfo] = []
        replaced: list[ChunkKey] = []
        kept = 0
        for number, (chunk, shorter) in enumerate(zip(chunks, useless, strict=True)):
            info = chunk.info
            if number == others:
                self.residency.make_room(sum(one.nbytes for one in chunks[others:]))
            if self._lacks_state(info):
                self.drop([info.key])
                replaced.append(info.key)
            if info.key not in self.catalogue:  # otherwise another process has just written it
                if not self.residency.put(chunk):
                    self.counts["rejected"] += 1
                    break
                if shorter is not None and shorter in self.catalogue:
                    self.drop([shorter])
                    replaced.append(shorter)
                new.append(info)
            self.in_use[info.key] += 1
            kept += 1
        self.catalogue.add(*new)
        self._turn_ends.note(new, turns)
        self.counts["admitted"] += len(new)
        return kept, replaced

    def _replaced_by(self, info: ChunkInfo) -> ChunkKey | None:
        """The chunk that a new one makes useless."""
        shorter = self.catalogue.leaf_extended_by(info.parent, info.token_ids)
        if shorter is None or self.is_held(shorter) or self.catalogue.info(shorter).has_state:
            return None
        return shorter

    def drop_states(self, path: Sequence[ChunkKey], since: int) -> None:
        """Drops the states of chunks at which turns before row ``since`` have ended, if only the
        next turn has gone on from there. In the slow tiers they stay."""
        infos = [self.catalogue.info(key) for key in path if key in self.catalogue]

        def is_needed(key: ChunkKey) -> bool:
            return self.is_held(key) or self.catalogue.num_children(key) != 1

        for info in self._turn_ends.over(infos, since, is_needed):
            if (smaller := self.residency.drop_states(info.key)) is not None:
                self.catalogue.describe(smaller)

    def _lacks_state(self, info: ChunkInfo) -> bool:
        """Whether a chunk with states is stored without them, and may be replaced."""
        known = info.has_state and info.key in self.catalogue
        return known and not (self.catalogue.info(info.key).has_state or self.is_held(info.key))

    def drop_superseded(self, root: ChunkKey, token_ids: TokenIds, repair: str) -> list[ChunkKey]:
        """Drops approximate copies of what is known exactly; returns those that were dropped."""
        dropped = []
        path = self.match(root, token_ids).exact
        exact = token_ids[: path[-1].end] if path else token_ids[:0]
        for key in self.catalogue.superseded(root, exact, repair):
            if not self.catalogue.num_children(key) and key not in self.in_use:
                self.drop([key])
                dropped.append(key)
        self.settle_pins()  # onto the exact rows
        return dropped

    def drop(self, keys: Sequence[ChunkKey], how: str = "") -> None:
        """Takes chunks out of the books. ``how``: what explanations say of it; nothing if other
        chunks hold the same text."""
        self.residency.drop(keys)
        for key in keys:
            self.on_gone(key, how)

    def release(self, keys: Sequence[ChunkKey]) -> None:
        """A request does not use these any more."""
        in_use = self.in_use
        for key in keys:
            if in_use[key] > 1:
                in_use[key] -= 1
            else:
                in_use.pop(key, None)

    def pin(
        self, name: str, root: ChunkKey, token_ids: TokenIds, *, repair: str, ttl: float | None
    ) -> Pin:
        self.settle_pins()
        hits = self.catalogue.in_place(root, token_ids, repair, self.residency.where)
        return self._kept.set(name, root, token_ids, hits, repair=repair, ttl=ttl)

    def unpin(self, name: str) -> Pin | None:
        return self._kept.drop(name)

    def pins(self) -> list[Pin]:
        self.settle_pins()
        return self._kept.all()

    def settle_pins(self) -> None:
        """Pins hold the chunks that are there now."""

        def find(pin: PinnedText) -> Sequence[Hit]:
            where = self.residency.where
            return self.catalogue.in_place(pin.root, pin.token_ids, pin.repair, where)

        self._kept.settle(find)

    def listen(self, listener: StoreListener, root: ChunkKey) -> None:
        self._listener, self._announced_root = listener, root

    def announce(self, root: ChunkKey, token_ids: TokenIds) -> None:
        """Tells the listener what is known of a text that was admitted."""
        if self._listener is not None and root == self._announced_root:
            self._listener.on_stored(token_ids, self.match(root, token_ids).exact)

    def announce_cleared(self) -> None:
        if self._listener is not None:
            self._listener.on_cleared()

    def most_valuable(self, limit: int) -> list[dict[str, Any]]:
        infos = self.catalogue.infos()
        return [
            {
                "key": key,
                "token_ids": infos[key].token_ids.tolist(),
                "tokens": infos[key].num_tokens,
                "bytes": infos[key].nbytes,
                "tier": self.residency.where(key),
                "lineage": infos[key].lineage.value,
                "position": infos[key].base_position,
                "uses": uses,
                "pinned": key in self._kept,
            }
            for key, uses in self.residency.last_to_go(limit)
            if key in infos
        ]

    def stats(self, remote: RemoteStats | None) -> StoreStats:
        residency, counts = self.residency, self.counts
        if remote is not None:
            remote = replace(remote, hits=residency.hits["remote"])
        moves = residency.move_stats()
        return StoreStats(
            chunks=len(self.catalogue),
            in_use=len(self.in_use),
            pinned=len(self._kept),
            pinned_bytes=self._kept.nbytes,
            max_pinned_bytes=self._kept.max_bytes,
            admitted=counts["admitted"],
            tiers=residency.tier_stats(),
            remote=remote,
            writing=None if residency.writer is None else residency.writer.stats(),
            moves=replace(
                moves,
                rejected=moves.rejected + counts["rejected"],
                failed=moves.failed + counts["failed"],
            ),
        )

    def check_integrity(self) -> list[str]:
        problems = self.catalogue.check_integrity() + self.residency.check_integrity()
        if nowhere := [key for key in self.catalogue if self.residency.where(key) is None]:
            problems.append(f"{len(nowhere)} chunks are in the catalogue and in no tier")
        if unknown := {key for key in self.residency.in_memory() if key not in self.catalogue}:
            problems.append(f"{len(unknown)} chunks are in memory and not in the catalogue")
        if any(count <= 0 for count in self.in_use.values()):
            problems.append(f"pins below zero: {dict(self.in_use)}")
        return problems

    # What the residency asks and says.

    def is_held(self, key: ChunkKey) -> bool:
        return key in self.in_use or key in self._kept

    def is_wanted(self, key: ChunkKey) -> bool:
        return key in self.catalogue

    def on_found(self, infos: Sequence[ChunkInfo]) -> None:
        is_new = {info.key: info for info in infos if info.key not in self.catalogue}
        self.catalogue.add(*filter(self._naming.can_use, is_new.values()))

    def on_found_in_remote(self, info: ChunkInfo) -> None:
        self.catalogue.add(info)
        self.residency.add_remote([info.key])

    def on_described(self, info: ChunkInfo) -> None:
        self.catalogue.describe(info)

    def on_gone(self, key: ChunkKey, how: str = "evicted") -> None:
        if key in self.catalogue:
            if how:
                self.departed.note(self.catalogue.info(key), how)
            self.catalogue.remove(key)
            if self._listener is not None:
                self._listener.on_gone(key)
        self._kept.on_gone(key)
        self._turn_ends.on_gone(key)
