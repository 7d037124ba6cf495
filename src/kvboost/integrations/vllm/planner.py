"""The scheduler's side: which rows of a prompt are known, and which rows of it to keep.

It knows tokens, pages and requests by name, and nothing of vLLM. Not thread-safe: vLLM's scheduler
calls it from one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise

import numpy as np

from kvboost.cache.chunk import ChunkInfo, Origin
from kvboost.cache.events.announcements import Announcements, Removed, Stored
from kvboost.cache.index import Index
from kvboost.cache.lookup.anchors import anchor_window
from kvboost.cache.lookup.catalogue import holding
from kvboost.cache.lookup.hits import Hit, KnownRows
from kvboost.cache.remote_lookup import RemoteLookup
from kvboost.cache.secret import Secret
from kvboost.cache.tiers.disk import DiskTier
from kvboost.cache.tiers.remote.tier import Listing, RemoteTier, open_remote
from kvboost.config import RepairParams
from kvboost.integrations.vllm.groups import Tables
from kvboost.integrations.vllm.options import Options, RequestOptions
from kvboost.reuse.copies import further_copies
from kvboost.reuse.cost import WORTHWHILE_RATIO, CostModel
from kvboost.reuse.plan import LIVE_TOKENS, Plan, make_plan
from kvboost.reuse.repair import PROBE_BAND
from kvboost.tokens.chunking import fixed
from kvboost.tokens.hashing import ChunkKey, TokenIds, as_token_ids, root_key

LOAD_SECONDS = 0.010
"""The cost of moving beside its forwards: the time that it takes of the thread in which vLLM's
scheduler and model run, 6 to 10 ms a request on an H200. The larger of them, so that a prompt that
is read in 18 ms (2,500 tokens there) is read. On a CPU it hardly counts."""
LEAST_ROWS = 64
"""Fewer known rows are computed: a load costs a step of the scheduler."""
GLANCED_ROWS = 4 * LEAST_ROWS
"""If rows are known after those that vLLM has, some of the first of them are found by content."""


@dataclass(frozen=True)
class Hello:
    """The facts that a worker tells of itself at the start."""

    fingerprint: str
    """Of the weights that it holds."""
    name: str
    row_bytes: int
    state_rows: int = 0
    """So many rows take as much memory as the states at one, of a model that has some."""
    moved_problem: str | None = None
    """Why moved text is not reused here; None if it is."""
    measured: tuple[tuple[int, int, float], ...] = ()
    """Forwards that it timed: rows, keys, seconds."""


@dataclass(frozen=True)
class Load:
    """Rows of a request up to ``end``, to be put into the pages of its ``tables`` as ``plan`` says;
    vLLM has those before ``first``. Further ``copies`` of moved rows are mixed with them. Rows
    whose page is 0 in a group's table are left out there: no row to come sees them."""

    request_id: str
    token_ids: TokenIds = field(compare=False)
    """Of the whole prompt."""
    plan: Plan
    """Of the whole prompt, of which vLLM computes the rows from ``end`` on."""
    end: int
    repair: RepairParams = field(default_factory=RepairParams)
    tables: Tables = ()
    copies: tuple[tuple[Hit, ...], ...] = ()

    @property
    def first(self) -> int:
        return self.plan.num_shared

    @property
    def name(self) -> tuple[str, int]:
        """Its request and first row: if vLLM finds other rows, a request has another load."""
        return self.request_id, self.first

    @property
    def infos(self) -> list[ChunkInfo]:
        """The chunks it needs, in order, those of copies last."""
        return [hit.chunk for hits in (self.plan.hits, *self.copies) for hit in hits]

    def failed(self) -> Load:
        """The rest of it when its rows could not be loaded."""
        plan = replace(self.plan, in_place=(), moved=())
        return replace(self, end=self.first, plan=plan, copies=())

    def computed(self) -> list[range]:
        """Its rows that are neither in place nor moved."""
        unknown = self.plan.computed()
        return [
            range(one.start, min(one.stop, self.end)) for one in unknown if one.start < self.end
        ]

    @property
    def exact_rows(self) -> int:
        """Where the first approximate row is; ``end`` if there is none."""
        return min(self.plan.exact_rows, self.end)


@dataclass(frozen=True)
class Keep:
    """New chunks of a request, to be copied out of the pages of its ``tables``. Their rows before
    ``first`` are not there any more: they are in the stored chunks of ``earlier``."""

    infos: tuple[ChunkInfo, ...]
    tables: Tables
    first: int = 0
    earlier: tuple[Hit, ...] = ()


@dataclass(frozen=True)
class Found:
    """Chunks that are to be forgotten."""

    keys: list[ChunkKey]
    problem: str = ""
    """Why there may be more of them in the remote store; empty if there are not."""


class Planner:
    """``page`` is the number of rows in one of vLLM's pages. ``announced`` is told which blocks are
    stored, if somebody listens. With ``resumes``, a model has states: a prompt goes on only where
    some are stored, and where a page ends."""

    def __init__(
        self,
        options: Options,
        page: int,
        announced: Announcements | None = None,
        *,
        resumes: bool = False,
    ) -> None:
        self.options = options
        self._page = page
        self._resumes = resumes
        self.chunk_size = size = options.engine.chunk_size
        if resumes:
            self.chunk_size = max(page, size - size % page)
        self.state_every = self.chunk_size
        """So many rows apart states are kept, at least."""
        self.state_rows = 0
        """So many rows take as much memory as the states that a load needs."""
        self.index: Index | None = None
        self._cost = CostModel(attention_share=1e-4)
        self.moves = False
        self.disk: DiskTier | None = None
        self.remote: RemoteTier | None = None
        self._in_remote: RemoteLookup | None = None
        self._announced = announced
        self.num_changes = 0
        """Of what is known: after one, a plan may be another."""

    def open(self, workers: Sequence[Hello]) -> None:
        """The workers are ready: finds what is in the folder. What the first of them has, all
        have, or a load fails and is computed."""
        config = self.options.engine_of(0, len(workers))
        secret = Secret(config.cache_secret) if config.cache_secret else None
        self._naming = b"" if secret is None else secret.naming
        self._fingerprint = " ".join(worker.fingerprint for worker in workers)
        self.moves = all(worker.moved_problem is None for worker in workers)
        for rows, keys, seconds in workers[0].measured:
            self._cost.observe(rows, keys, seconds)
        chunk_size, page = self.chunk_size, self._page
        self.state_rows = workers[0].state_rows
        # So that they take no more memory than rows do.
        self.state_every = max(chunk_size, -(-self.state_rows // page) * page)
        index = self.index = Index(
            lambda ids, boundaries: _cut(len(ids), tuple(boundaries), chunk_size),
            Origin(workers[0].fingerprint, workers[0].name),
            row_bytes=workers[0].row_bytes,
            naming=self._naming,
            window=anchor_window(chunk_size),
            on_removed=self._announced.gone if self._announced is not None else lambda keys: None,
            resumes=self._resumes,
        )
        if config.disk_cache_dir is not None:
            self.disk = DiskTier(config.disk_cache_dir, config.disk_cache_bytes, secret=secret)
            self._refresh()
        if config.remote_cache_url is not None:
            self.remote = open_remote(
                config.remote_cache_url, config.remote_cache_bytes, secret=secret
            )
            self._in_remote = RemoteLookup(
                self.remote, index.naming, index, lambda info: index.add(info, "remote")
            )

    @property
    def is_open(self) -> bool:
        return self.index is not None

    def root(self, salt: str) -> ChunkKey:
        """The root of the tree for these weights and ``salt``."""
        return _root(self._fingerprint, salt, self._naming)

    def repair(self, asked: RequestOptions) -> RepairParams:
        usual = self.options.engine.repair
        return usual if asked.ratio == usual.ratio else replace(usual, ratio=asked.ratio)

    def may_know(
        self, token_ids: Sequence[int], local: int, salt: str, asked: RequestOptions
    ) -> bool:
        """Whether a plan for a prompt whose first ``local`` rows vLLM has could find something to
        load. Where moved text would not pay, a glance at a few tokens tells: only chunks shorter
        than a window, one after another, are overlooked."""
        index, total = self.index, len(token_ids)
        if index is None or asked.mode == "off" or total - 1 - local < LEAST_ROWS:
            return False
        if self._in_remote is not None or self._moved_before(local, total, asked):
            return True
        self._refresh()
        return index.may_hold(self.root(salt), prompt_ids(token_ids[local : local + GLANCED_ROWS]))

    def plan(
        self, request_id: str, token_ids: TokenIds, local: int, salt: str, asked: RequestOptions
    ) -> Load | None:
        """The plan to load a prompt whose first ``local`` rows vLLM has; None if it would not pay.
        The last row is always left to vLLM, which needs its logits."""
        index = self.index
        if index is None or asked.mode == "off":
            return None
        self._refresh()
        total, repair, root = len(token_ids), self.repair(asked), self.root(salt)
        ids = token_ids[: total - 1]
        moved_before = self._moved_before(local, total, asked)

        def lookup() -> KnownRows:
            return self._lookup(root, ids, moved_before)

        in_remote: list[ChunkKey] = []
        if self._in_remote is not None:
            in_remote = self._in_remote.ask(root, ids, moved_before, lookup)
        known, load = lookup(), None
        end = known.in_place[-1].end if known.in_place else 0
        if known.moved or end - local >= LEAST_ROWS:
            plan = make_plan(total, known, local)
            if not self._cost.moving_pays(plan, repair, more_seconds=LOAD_SECONDS):
                plan = plan.without_moved()
            load = self._load(request_id, token_ids, local, plan, repair)
        if load is not None and load.plan.moved:
            load = replace(load, copies=further_copies(known.moved, load.plan.moved, "ram"))
        used = {info.key for info in load.infos} if load is not None else set()
        index.remove([key for key in in_remote if key not in used])
        return load

    def _lookup(self, root: ChunkKey, token_ids: TokenIds, moved_before: int = 0) -> KnownRows:
        """The stored rows of ``token_ids``. With a model with states, only those before the last
        stored states at the end of a page: another process may have had smaller pages."""
        assert self.index is not None
        known = self.index.lookup(root, token_ids, moved_before=moved_before)
        if not self._resumes:
            return known
        ends = [hit.end for hit in known.exact if hit.chunk.has_state]
        end = max((one for one in ends if one % self._page == 0), default=0)
        return KnownRows(tuple(hit for hit in known.exact if hit.end <= end))

    def _moved_before(self, local: int, total: int, asked: RequestOptions) -> int:
        """Before which row moved text is looked for; 0 if it is not."""
        moves = self.moves and asked.mode == "repaired"
        if not moves or not self._may_pay(local, total, self.repair(asked)):
            return 0
        return max(0, total - LIVE_TOKENS)

    def _may_pay(self, local: int, total: int, repair: RepairParams) -> bool:
        """Whether moving could pay if all rows from ``local`` on were known and hardly any had to
        be computed again: finding them takes longer the longer the prompt is. At least as often as
        ``CostModel.moving_pays``."""
        if repair.strategy != "auto" or repair.reuse_moved == "always":
            return True
        rows, forward = total - local, self._cost.forward
        moving = (1 + PROBE_BAND[1]) * forward(LIVE_TOKENS, total)
        moving += LOAD_SECONDS if self._cost.is_measured else 0.0
        return moving < WORTHWHILE_RATIO * forward(rows, (local + total) // 2)

    def keep(
        self,
        token_ids: TokenIds,
        tables: Tables,
        salt: str,
        asked: RequestOptions,
        first: int = 0,
    ) -> tuple[Keep | None, list[ChunkKey]]:
        """The rows to keep of a request, and the chunks that this replaces. ``token_ids`` are those
        of its exact rows; only those from ``first`` on are in its pages. Approximate rows stay in
        vLLM's pages alone: stored, they would push out the text that they were made from. Of a
        model with states, those after the last of ``token_ids`` are kept too."""
        index = self.index
        if index is None or asked.mode == "off":
            return None, []
        root = self.root(salt)
        stored = index.lookup(root, token_ids[:first]).exact if first else ()
        boundaries: Sequence[int] = asked.boundaries
        if self._resumes:  # the chunks up to the last states stay as they are
            boundaries = [hit.end for hit in index.lookup(root, token_ids).exact]
        new, replaced = index.store(root, token_ids, boundaries=boundaries)
        self.num_changes += bool(new or replaced)
        if not new:
            return None, replaced
        start, earlier = new[0].base_position, tuple[Hit, ...]()
        if start < first:
            if not stored or stored[-1].end < first:  # evicted meanwhile
                index.remove([info.key for info in new])
                return None, replaced
            earlier = tuple(hit.clip(start, first) for hit in stored if hit.end > start)
        return Keep(tuple(new), tables, first, earlier), replaced

    def num_stored(self, token_ids: TokenIds, salt: str) -> int:
        """How many of the first rows are stored."""
        if self.index is None:
            return 0
        exact = self._lookup(self.root(salt), token_ids).exact
        return exact[-1].end if exact else 0

    def announce(self, hashes: Sequence[bytes], token_ids: TokenIds, salt: str) -> None:
        """Announces the blocks of ``token_ids``, named by ``hashes``, that are stored exactly."""
        if self.index is not None and self._announced is not None:
            known = self.index.lookup(self.root(salt), token_ids)
            self._announced.store(hashes, token_ids, known.exact)

    def take_announcements(self) -> list[Stored | Removed]:
        """The events of blocks that were stored or are gone since the last call."""
        index = self.index
        if index is None or self._announced is None:
            return []
        return self._announced.take(lambda key: key in index)

    def gone(self, keys: Collection[ChunkKey]) -> None:
        """A worker does not have these any more."""
        if self.index is not None and keys:
            self.index.remove(keys)
            self.num_changes += 1

    def learn(self, measured: Sequence[tuple[int, int, float]]) -> None:
        """Workers have timed these forwards."""
        for rows, keys, seconds in measured:
            self._cost.observe(rows, keys, seconds)
        self.num_changes += bool(measured)

    def forget(self) -> list[ChunkKey]:
        """Forgets everything; returns the keys, which workers must drop."""
        self.num_changes += 1
        return [] if self.index is None else self.index.clear()

    def search(self, salt: str, texts: Sequence[TokenIds] | None) -> Callable[[], Found]:
        """A search for the chunks under ``salt`` that contain a piece of ``texts`` or follow such a
        chunk; without ``texts``, for all of them. It is for another thread: it looks at every chunk
        and lists the remote store."""
        assert self.index is not None
        self._refresh(now=True)
        root, remote = self.root(salt), self.remote
        here = self.index.infos(root)

        def search() -> Found:
            listed = Listing() if remote is None else remote.list_chunks()
            infos = {info.key: info for info in listed.infos if info.root == root} | here
            keys = list(infos) if texts is None else holding(infos, texts)
            return Found(keys, listed.problem)

        return search

    def num_chunks(self, salt: str | None = None) -> int:
        """The number of chunks, or of those under ``salt``."""
        if self.index is None:
            return 0
        return len(self.index) if salt is None else len(self.index.infos(self.root(salt)))

    def close(self) -> None:
        for tier in (self.disk, self.remote):
            if tier is not None:
                tier.close()

    def _load(
        self, request_id: str, token_ids: TokenIds, local: int, plan: Plan, repair: RepairParams
    ) -> Load | None:
        """``plan`` up to a page's end."""
        last = len(token_ids) - 1
        end = last - last % self._page
        moved = tuple(run.clip(local, end) for run in plan.moved if run.start < end)
        if not moved:
            end = plan.in_place[-1].end if plan.in_place else local
            end -= end % self._page
        if end - local < LEAST_ROWS:
            return None
        in_place = tuple(hit.clip(local, end) for hit in plan.in_place if hit.start < end)
        plan = replace(plan, in_place=in_place, moved=moved)
        return Load(request_id, token_ids, plan, end, repair)

    def _refresh(self, *, now: bool = False) -> None:
        """Notices what processes have written to the folder or removed from it."""
        if self.disk is None or self.index is None:
            return
        changes = self.disk.refresh(now=now)
        self.num_changes += bool(changes.gone or changes.added)
        self.index.remove([key for key in changes.gone if self.index.tier(key) == "disk"])
        for info in changes.added:
            if info.key not in self.index:
                self.index.add(info, "disk")


@lru_cache(maxsize=4096)
def _root(fingerprint: str, salt: str, naming: bytes) -> ChunkKey:
    return root_key(fingerprint, salt, secret=naming)


@lru_cache(maxsize=256)
def _cut(num_tokens: int, boundaries: tuple[int, ...], chunk_size: int) -> list[tuple[int, int]]:
    places = [0, *sorted({place for place in boundaries if 0 < place < num_tokens}), num_tokens]
    return [
        (begin + start, begin + end)
        for begin, stop in pairwise(places)
        for start, end in fixed(stop - begin, chunk_size)
    ]


def repair_name(repair: RepairParams) -> str:
    """Names a repair. Requests with the same repair may continue from each other's rows."""
    return f"vllm {repair.name}"


def salt_of(cache_salt: str | None, adapter: str | None) -> str:
    """One salt for everything that keeps requests apart. Lengths keep the parts apart."""
    return f"{len(cache_salt or '')}:{cache_salt or ''}{adapter or ''}"


def prompt_ids(token_ids: Sequence[int]) -> TokenIds:
    return as_token_ids(np.fromiter(token_ids, np.int32, len(token_ids)))
