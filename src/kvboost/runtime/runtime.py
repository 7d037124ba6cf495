"""The parts that all requests of an engine share: the model, the chunk store, buffers and costs."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvboost.cache.chunk import Origin
from kvboost.cache.events.layout import medium
from kvboost.cache.events.publisher import EventPublisher
from kvboost.cache.eviction.learned import LearnedPolicy
from kvboost.cache.lookup.anchors import anchor_window
from kvboost.cache.store import ChunkStore
from kvboost.config import EngineConfig, GenerationMode
from kvboost.errors import KVBoostError, KVTooLargeError
from kvboost.model.execution.states import RowStates
from kvboost.model.loading.load import LoadedModel
from kvboost.model.loading.machine import release_freed_memory
from kvboost.model.paged.pool import why_buffers
from kvboost.results import ReuseReport
from kvboost.reuse.cost import CostModel
from kvboost.runtime.adapters import Adapters
from kvboost.runtime.backend import Backend
from kvboost.runtime.idle_work import IdleQueue
from kvboost.runtime.planner import Planner
from kvboost.runtime.request import Request
from kvboost.runtime.sharing import RunningRequests
from kvboost.runtime.speculation.draft_model import DraftModel
from kvboost.runtime.speculation.speculation import Speculation
from kvboost.runtime.totals import Totals
from kvboost.tokens.chunking import Cutter
from kvboost.tokens.hashing import ChunkKey, TokenIds, root_key

INITIAL_ANSWER_ROWS = 512
"""Rows reserved for an answer at first. A longer answer makes the request's KV grow."""
TRIM_EVERY = 8


class Runtime:
    """One per engine. Thread-safe: each part has a lock of its own."""

    def __init__(self, model: LoadedModel, config: EngineConfig, costs: Path | None = None) -> None:
        self.model = model
        self._config = config
        self.backend = backend = self._make_backend()
        self.pool = backend.pool
        self.max_kv_bytes = backend.max_kv_bytes
        self.store = ChunkStore(
            backend.tiers,
            cut=Cutter(
                config.chunking,
                config.chunk_size,
                model.tokenizer.decode,
                model.vocab_size,
            ),
            origin=Origin(model.fingerprint, model.name),
            format=backend.kv_format,
            window=anchor_window(config.chunk_size),
            policy=LearnedPolicy,
            attention_share=model.attention_share,
            max_pinned_bytes=config.max_pinned_bytes or config.max_cache_bytes // 2,
            state_every=backend.state_every,
        )
        secret = backend.tiers.secret
        self._naming = b"" if secret is None else secret.naming
        self.adapters = Adapters(model.forward, self.store, self.root, backend.no_adapters)
        self.cost = CostModel(model.attention_share, costs)
        backend.serve(self.store, self.cost)
        self.speculation = Speculation(self.cost)
        self._draft_model = self._load_draft_model()
        moves = backend.rotation is not None
        self.planner = Planner(
            self.store,
            self.cost,
            model.support,
            self.root_of,
            moves=moves,
            decode=model.tokenizer.decode,
        )
        self._events = self._publish_events(config)
        self.trimmer = Trimmer()
        self.running = RunningRequests(shares=backend.shares_rows)
        self.totals = Totals(config.chunk_size)
        self.idle_work = IdleQueue()

    def root(self, salt: str, adapter: str = "") -> ChunkKey:
        """The root of the prefix tree for this model, its adapters, the precision of stored KV
        and ``salt``. ``adapter``: the digest of the one that a request names."""
        bits = self._config.kv_cache_bits
        identity = f"{self.model.fingerprint} {self.model.active_adapters} {bits}"
        identity += f" adapter {adapter}" if adapter else ""
        return root_key(identity, salt, secret=self._naming)

    def root_of(self, request: Request) -> ChunkKey:
        """The root of the prefix tree that a request uses."""
        return self.adapters.root(request.salt, request.adapter)

    def answer_limit(self, request: Request) -> int:
        """How many tokens may be generated: ``max_new_tokens``, or what the context still holds."""
        limit = request.params.max_new_tokens
        if self.model.context_length is not None:
            limit = min(limit, self.model.context_length - len(request.token_ids))
        return limit

    def rows_for(self, request: Request, *, batched: bool) -> int:
        """How many KV rows to reserve for a request. A batch counts memory before a request
        starts, so there it is all the rows the request may ever need."""
        answer, prompt = self.answer_limit(request), len(request.token_ids)
        if self.pool.far is not None and self.pool.far.takes(prompt + answer):
            return prompt + answer
        reserved = answer if batched else min(answer, INITIAL_ANSWER_ROWS)
        return prompt + reserved

    def make_states(self, *, kept: bool) -> RowStates | None:
        """The states of a request, and whether copies of them are ``kept``; None for a model
        without such."""
        if not self.model.forward.states:
            return None
        return RowStates(self.model.forward.states, self.backend.state_every if kept else None)

    def check_size(self, request: Request) -> None:
        """Raises ``KVTooLargeError`` if a request could not even run alone."""
        rows, far = self.rows_for(request, batched=True), self.pool.far
        needed = rows * self.model.forward.shape.row_bytes + self.pool.state_bytes(rows)
        if far is not None and far.takes(rows):
            far.check(rows)
        elif needed > self.max_kv_bytes:
            raise KVTooLargeError(rows, needed, self.max_kv_bytes)

    def has_room(self, request: Request, root: ChunkKey) -> bool:
        """Whether the KV of one more request fits beside that of those that run."""
        rows, far = self.rows_for(request, batched=True), self.pool.far
        if far is not None and far.takes(rows) and not far.has_room(rows):
            return False
        if request.mode is GenerationMode.PREFIX_CACHE:  # other modes may reuse moved text instead
            rows -= self.running.num_shared(request, root)
        return self.running.nbytes()[0] + self.pool.bytes_for(rows) <= self.max_kv_bytes

    def plan(self, request: Request) -> ReuseReport:
        """How a request would be served now."""
        live_end = len(request.token_ids)
        with self.planner.lookup(request, live_end, pin=False) as lookup:
            plan, report = self.planner.plan(request, lookup.known, live_end)
        return replace(report, strategy=request.repair.strategy if plan.moved else None)

    def known_exactly(self, token_ids: TokenIds, salt: str) -> int:
        """How many of the first tokens an exact hit would cover."""
        with self.store.lookup(self.root(salt), token_ids, pin=False) as known:
            return known.exact[-1].end if known.exact else 0

    def estimate_ms(self, num_tokens: int) -> float | None:
        """How long a full prefill would take; None until forwards have been measured."""
        if not self.cost.is_measured:
            return None
        return self.cost.forward(num_tokens, num_tokens // 2) * 1e3

    def stats(self) -> dict[str, Any]:
        """The contents of the cache in numbers, and the totals of all requests so far."""
        store = self.store.stats()
        memory = store.tiers["ram"]
        return {
            "hot_chunks": memory.chunks,
            "hot_memory_mb": memory.nbytes / 1e6,
            **self.totals.as_dict(),
            "idle_kv_bytes": self.pool.idle_bytes,
            **({} if self.pool.far is None else {"far_kv_bytes": self.pool.far.used_bytes}),
            **store.as_dict(),
            **({} if self._events is None else {"kv_events": self._events.stats().as_dict()}),
        }

    def check_integrity(self) -> list[str]:
        """The mistakes in the records of the cache and of running requests; empty if all is
        well."""
        return self.store.check_integrity() + self.pool.check_integrity()

    def notes(self) -> list[str]:
        """Why decoding runs slower on a GPU than it could."""
        return self.backend.notes(has_adapters=bool(self.adapters.infos()))

    @property
    def failure(self) -> KVBoostError | None:
        """Why no more requests can be served; None if they can."""
        return None

    def close(self) -> None:
        """Saves the learned costs, closes the store and restores the model's own attention."""
        self.cost.save()
        self.store.close()
        if self._events is not None:
            self._events.close()
        if self._draft_model is not None:
            self._draft_model.close()
        self.backend.close()

    def _make_backend(self) -> Backend:
        reason = why_buffers(self.model.forward)
        if reason:
            return Backend(self.model, self._config, reason)
        from kvboost.runtime.paged_backend import PagedBackend  # it needs triton

        return PagedBackend(self.model, self._config)

    def _load_draft_model(self) -> DraftModel | None:
        if self._config.draft_model is None or self._config.speculate == "off":
            return None
        draft_model = DraftModel(self._config.draft_model, self.model)
        self.speculation.make_drafters = draft_model.make_drafters
        return draft_model

    def _publish_events(self, config: EngineConfig) -> EventPublisher | None:
        """Announces the text that is read without a salt: salts keep tenants apart, and events
        would show what they send."""
        if config.kv_events is None:
            return None
        is_slow = bool(config.disk_cache_dir or config.remote_cache_url)
        root = self.root("")
        publisher = EventPublisher(
            config.kv_events, root, medium=medium(is_slow=is_slow), is_known=self.store.__contains__
        )
        self.store.listen(publisher, root)
        return publisher


class Trimmer:
    """Makes the C library return unused memory from time to time.

    A forward allocates and frees tensors of many sizes, and longer-lived objects end up between
    them. Without trimming, the heap of a long-running process grows to a multiple of what is in
    use.
    """

    def __init__(self) -> None:
        self._requests = 0
        self._lock = threading.Lock()

    def after_request(self) -> None:
        """Call it at the end of every request. It trims after each ``TRIM_EVERY`` requests."""
        with self._lock:
            self._requests += 1
            due = self._requests % TRIM_EVERY == 0
        if due:
            release_freed_memory()
