"""What all requests of an engine share: the model, the chunk store, buffers and costs."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from kvboost.cache.chunk import Origin
from kvboost.cache.events.layout import medium
from kvboost.cache.events.publisher import EventPublisher
from kvboost.cache.eviction.learned import LearnedPolicy
from kvboost.cache.lookup.anchors import anchor_window
from kvboost.cache.quantize import KVFormat, Quantizer
from kvboost.cache.store import ChunkStore
from kvboost.cache.tiers.open import open_tiers
from kvboost.config import EngineConfig
from kvboost.model.kv import KVPool
from kvboost.model.load import LoadedModel
from kvboost.model.machine import memory_bytes
from kvboost.model.native.moved_rows import move_keys
from kvboost.model.paged.choose import PagesChoice, choose_pages, make_capture
from kvboost.model.paged.pool import PagedPool
from kvboost.results import ReuseReport
from kvboost.reuse.cost import CostModel
from kvboost.reuse.rope import Rotation
from kvboost.runtime.memory import Trimmer
from kvboost.runtime.planner import Planner
from kvboost.runtime.request import Request
from kvboost.runtime.sharing import RunningRequests
from kvboost.runtime.totals import Totals
from kvboost.runtime.unhealed import UnhealedQueue
from kvboost.tokens.chunking import Cutter
from kvboost.tokens.hashing import ChunkKey, TokenIds, root_key

INITIAL_ANSWER_ROWS = 512
"""Rows reserved for an answer at first. A longer answer makes the request's KV grow."""
MEMORY_SHARE = 0.25
"""Of a machine's memory, or twice that of what is free on a GPU, for the KV of running requests."""
SLICE_ON_CPU = 2048
SLICE_ON_GPU = 16384  # a forward costs launches first: fewer, larger ones


class Runtime:
    """One per engine. Thread-safe: each part has a lock of its own."""

    ends_forwards = True
    """Whether a forward may be ended between two layers, by a hook that raises."""

    def __init__(self, model: LoadedModel, config: EngineConfig, costs: Path | None = None) -> None:
        self.model = model
        self._config = config
        tiers = open_tiers(config, model.device)
        self.max_kv_bytes = _kv_budget(config, model.device)
        self.pages = choose_pages(model.forward.packed, model.forward.model)
        self.pool = _make_pool(model, config, self.max_kv_bytes, self.pages)
        self.store = ChunkStore(
            tiers,
            cut=Cutter(
                config.chunking,
                config.chunk_size,
                model.tokenizer.decode,
                model.vocab_size,
                config.document_markers,
            ),
            origin=Origin(model.fingerprint, model.name),
            format=_kv_format(model, config),
            window=anchor_window(config.chunk_size),
            max_chunks=config.max_chunks,
            policy=partial(LearnedPolicy, use_importance=config.key_norms),
            attention_share=model.attention_share,
        )
        self._naming = b"" if tiers.secret is None else tiers.secret.naming
        self.cost = CostModel(model.attention_share, costs)
        self.rotation = _rotation(model)
        self.planner = Planner(
            self.store, self.cost, model.support, self.root, moves=self.rotation is not None
        )
        self.quantizer = Quantizer(
            config.kv_cache_bits,
            self.rotation,
            own=tiers.ram.own if model.device.type == "cpu" else None,
            measures_keys=config.key_norms,
        )
        self.prefill_slice = config.prefill_slice or (
            SLICE_ON_CPU if model.device.type == "cpu" else SLICE_ON_GPU
        )
        self._events = self._publish_events(config)
        self.trimmer = Trimmer()
        self.running = RunningRequests(shares=model.support.reuse_limit is None)
        self.totals = Totals(config.chunk_size)
        self.unhealed = UnhealedQueue()

    def root(self, salt: str) -> ChunkKey:
        """The root of the prefix tree for this model, its adapters, the precision of stored KV
        and ``salt``."""
        bits = self._config.kv_cache_bits
        identity = f"{self.model.fingerprint} {self.model.active_adapters} {bits}"
        return root_key(identity, salt, secret=self._naming)

    def answer_limit(self, request: Request) -> int:
        """How many tokens may be generated: ``max_new_tokens``, or what the context still holds."""
        limit = request.params.max_new_tokens
        if self.model.context_length is not None:
            limit = min(limit, self.model.context_length - len(request.token_ids))
        return limit

    def rows_for(self, request: Request, *, batched: bool) -> int:
        """How many KV rows to reserve for a request. A batch counts memory before a request
        starts, so there it is all the rows the request may ever need."""
        answer = self.answer_limit(request)
        reserved = answer if batched else min(answer, INITIAL_ANSWER_ROWS)
        return len(request.token_ids) + reserved

    def plan(self, request: Request) -> ReuseReport:
        """How a request would be served now."""
        with self.planner.lookup(request, len(request.token_ids), pin=False) as known:
            plan, notes = self.planner.plan(request, known)
        return ReuseReport(plan.spans, notes, request.repair.strategy if plan.moved else None)

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
        """What the cache holds, and the totals of all requests so far."""
        store = self.store.stats()
        memory = store.tiers["ram"]
        return {
            "hot_chunks": memory.chunks,
            "hot_memory_mb": memory.nbytes / 1e6,
            **self.totals.stats().as_dict(),
            "idle_kv_bytes": self.pool.idle_bytes,
            **store.as_dict(),
            **({} if self._events is None else {"kv_events": self._events.stats().as_dict()}),
        }

    def check_integrity(self) -> list[str]:
        """What is wrong with the records of the cache and of running requests."""
        return self.store.check_integrity() + self.pool.check_integrity()

    def notes(self) -> list[str]:
        """Why decoding runs slower on a GPU than it could."""
        if self.model.device.type != "cuda":
            return []
        if not self.pages.used:
            return [f"requests have no pages: {self.pages.reason}"]
        steps, layers = self.model.forward.steps, self.model.forward.step_layers
        found = [steps.capture.note if steps else None, layers.note if layers else None]
        return [note for note in found if note is not None]

    def close(self) -> None:
        """Saves the learned costs, closes the store and restores the model's own attention."""
        self.cost.save()
        self.store.close()
        if self._events is not None:
            self._events.close()
        self.pool.clear()
        self.model.forward.leave_pages()
        self.model.forward.release()

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


def _kv_budget(config: EngineConfig, device: torch.device) -> int:
    """How many bytes the KV of running requests may take."""
    if config.max_kv_bytes is not None:
        return config.max_kv_bytes
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * 2 * MEMORY_SHARE)
    return int(memory_bytes() * MEMORY_SHARE) or 4 * 1024**3


def _make_pool(
    model: LoadedModel, config: EngineConfig, num_bytes: int, pages: PagesChoice
) -> KVPool:
    forward = model.forward
    if not pages.used:
        return KVPool(forward.shape, max_idle=8)
    captures = make_capture(forward.shape.device, config.graphs)
    return PagedPool(
        forward.shape,
        num_bytes,
        config.max_running,
        model.context_length,
        on_slab=lambda slab: forward.use_pages(slab, captures),
    )


def _kv_format(model: LoadedModel, config: EngineConfig) -> KVFormat:
    """What stored chunks of this engine look like."""
    shape = model.forward.shape
    return KVFormat(
        shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.dtype, config.kv_cache_bits
    )


def _rotation(model: LoadedModel) -> Rotation | None:
    """How keys rotate to another position; None if the model has no rotary positions."""
    if model.frequencies is None:
        return None
    interleaved = model.support.architecture.interleaved
    return Rotation(model.frequencies, interleaved=interleaved, kernel=move_keys)
