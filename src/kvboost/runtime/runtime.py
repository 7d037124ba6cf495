"""What all requests of an engine share: the model, the chunk store, buffers and costs."""

from __future__ import annotations

import gc
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvboost.cache.chunk import Origin
from kvboost.cache.events.layout import medium
from kvboost.cache.events.publisher import EventPublisher
from kvboost.cache.eviction.learned import LearnedPolicy
from kvboost.cache.lookup.anchors import anchor_window
from kvboost.cache.lookup.hits import KnownRows
from kvboost.cache.quantize import KVFormat, Quantizer
from kvboost.cache.store import ChunkStore
from kvboost.cache.tiers.open import Tiers, open_tiers
from kvboost.cache.tiers.ordered import Aside
from kvboost.cache.tiers.ram import RamTier
from kvboost.config import EngineConfig
from kvboost.errors import KVBoostError
from kvboost.model.host_memory import host_memory
from kvboost.model.kv import KVPool, Prefix, RequestKV
from kvboost.model.load import LoadedModel
from kvboost.model.machine import memory_bytes
from kvboost.model.native.moved_rows import move_keys
from kvboost.model.paged.choose import PagesChoice, choose_pages, make_capture
from kvboost.model.paged.graphs import Capture, NoCapture
from kvboost.model.paged.kv import PagedKV
from kvboost.model.paged.pool import PagedPool
from kvboost.results import ReuseReport
from kvboost.reuse.assemble import Packer
from kvboost.reuse.cost import CostModel, unpadded
from kvboost.reuse.request import BufferedRows, RequestRows
from kvboost.reuse.rope import Rotation
from kvboost.reuse.step_times import size_of
from kvboost.runtime.adapters import Adapters
from kvboost.runtime.far import open_far, slab_bytes
from kvboost.runtime.idle_work import IdleQueue
from kvboost.runtime.memory import Trimmer
from kvboost.runtime.planner import Planner
from kvboost.runtime.request import Request
from kvboost.runtime.sharing import RunningRequests
from kvboost.runtime.speculation.draft_model import DraftModel
from kvboost.runtime.speculation.speculation import Speculation
from kvboost.runtime.totals import Totals
from kvboost.tokens.chunking import Cutter
from kvboost.tokens.hashing import ChunkKey, TokenIds, root_key

if TYPE_CHECKING:
    from kvboost.model.paged.slab import Slab
    from kvboost.reuse.paged.forwards import SegmentForwards
    from kvboost.reuse.paged.stored import PageStore

INITIAL_ANSWER_ROWS = 512
"""Rows reserved for an answer at first. A longer answer makes the request's KV grow."""
MAX_IDLE = 8
"""KV buffers that are kept for the next requests."""
SPARE_SHARE = 64
"""One of so many pages is kept free, by a thread that evicts chunks before requests must."""
MEMORY_SHARE = 0.25
"""Of a machine's memory, or twice that of what is free on a GPU, for the KV of running requests."""
SLICE_ON_CPU = 1024
SLICE_ON_GPU = 16384  # a forward costs launches first: fewer, larger ones


class Runtime:
    """One per engine. Thread-safe: each part has a lock of its own."""

    ends_forwards = True
    """Whether a forward may be ended between two layers, by a hook that raises."""
    no_adapters: str | None = None
    """Why no adapters can be loaded."""
    no_far: str | None = None
    """Why no request can have far rows."""

    def __init__(self, model: LoadedModel, config: EngineConfig, costs: Path | None = None) -> None:
        self.model = model
        self._config = config
        self.pages = self._choose_pages()
        if self.keeps_pages:
            self.max_kv_bytes = _kv_budget(config, model)
            tiers = self._open_tiers()
        else:  # the cache's share of a GPU first, then half of what is left
            tiers = self._open_tiers()
            self.max_kv_bytes = _kv_budget(config, model)
        self._gpu_tier = tiers.gpu
        self.pool = self._make_pool()
        self.pool.far = open_far(config, model, self.max_kv_bytes, self.no_far)
        self._forwards: SegmentForwards | None = None
        self._page_store: PageStore | None = None
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
            format=self._kv_format(),
            window=anchor_window(config.chunk_size),
            max_chunks=config.max_chunks,
            policy=partial(LearnedPolicy, use_importance=config.key_norms),
            attention_share=model.attention_share,
            max_pinned_bytes=config.max_pinned_bytes or config.max_cache_bytes // 2,
        )
        self._naming = b"" if tiers.secret is None else tiers.secret.naming
        self.adapters = Adapters(model.forward, self.store, self.root, self.no_adapters)
        self.cost = CostModel(model.attention_share, costs)
        self.speculation = Speculation(self.cost)
        self._draft_model = self._load_draft_model()
        self.rotation = rotation_of(model)
        self.planner = Planner(
            self.store, self.cost, model.support, self.root_of, moves=self.rotation is not None
        )
        self._quantizer = make_quantizer(
            model, self.rotation, tiers.ram, config.kv_cache_bits, config.key_norms
        )
        self.packer = self._make_packer(self._quantizer)
        self.most_rows = None if model.placement is None else model.placement.plan.most_rows
        """How many rows of a forward there is memory for; None: for any slice."""
        slice_rows = SLICE_ON_CPU if model.device.type == "cpu" else SLICE_ON_GPU
        self.prefill_slice = config.prefill_slice or self.most_rows or slice_rows
        self._events = self._publish_events(config)
        self.trimmer = Trimmer()
        self.running = RunningRequests(shares=self._shares_rows())
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
            **({} if self.pool.far is None else {"far_kv_bytes": self.pool.far.used_bytes}),
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
        steps, layers = self.model.forward.steps, self.model.forward.fused_layers
        own = self._forwards.note if self._forwards else None
        found = [steps.capture.note if steps else None, layers.note if layers else None, own]
        if self.model.placement is not None:
            found.append(self.model.placement.note)
        if self.adapters.infos():
            found.append("prompts with adapters are read without CUDA graphs and fused layers")
        return [note for note in found if note is not None]

    @property
    def failure(self) -> KVBoostError | None:
        """Why no more requests can be served; None if they can."""
        return None

    @property
    def forwards(self) -> SegmentForwards | None:
        """What runs rows of single requests over pages, once there are some."""
        return self._forwards

    @property
    def drafts(self) -> bool:
        """Whether requests draft tokens unless they say otherwise."""
        return self._config.speculate != "off"

    @property
    def num_graphs(self) -> int:
        """How many CUDA graphs have been recorded."""
        steps = self.model.forward.steps
        return steps.capture.num_graphs if steps is not None else 0

    def close(self) -> None:
        """Saves the learned costs, closes the store and restores the model's own attention."""
        self.cost.save()
        self.store.close()
        if self._events is not None:
            self._events.close()
        if self._draft_model is not None:
            self._draft_model.close()
        self._leave_slab()
        self.model.forward.remove_adapters()
        self.model.forward.release()

    def rows_of(self, kv: RequestKV) -> RequestRows:
        """The rows of a request, for reuse."""
        forwards = self._forwards
        if forwards is None or not isinstance(kv, PagedKV) or kv.slab is not forwards.slab:
            return BufferedRows(kv, self.packer, self.rotation)
        from kvboost.reuse.paged.request import PagedRequest

        most = forwards.most_rows
        return PagedRequest(kv, forwards.kernels, self.packer, most, self._page_store)

    def kept_prefix(self, known: KnownRows, most_rows: int) -> Prefix | None:
        """Pages of the cache that hold the beginning of a prompt, at most ``most_rows`` rows."""
        if self._page_store is None or not known.exact:
            return None
        stored = self.store.at_hand(known.exact)
        return self._page_store.prefix(known.exact, stored, most_rows)

    # What differs if the model is split over several ranks: see runtime/parallel.

    def _open_tiers(self) -> Tiers:
        device = self.model.device
        pages = slab_bytes(self._config, self.max_kv_bytes) if self.keeps_pages else 0
        return open_tiers(self._config, device, lambda size: host_memory(size, device), pages)

    def _choose_pages(self) -> PagesChoice:
        return choose_pages(self.model.forward.packed, self.model.forward.model)

    def _make_pool(self) -> KVPool:
        model = self.model
        shape = model.forward.shape
        if not self.pages.used:
            return KVPool(shape, MAX_IDLE)
        return PagedPool(
            shape,
            slab_bytes(self._config, self.max_kv_bytes),
            self._config.max_running,
            model.context_length,
            on_slab=self._use_slab,
            keeps=self.keeps_pages,
        )

    @property
    def keeps_pages(self) -> bool:
        """Whether the cache in GPU memory is pages of ended requests: if there is to be one, with
        rows in full precision as they were computed, and if any prompt may use them."""
        config = self._config
        is_wanted = config.gpu_cache_bytes != 0 and config.kv_cache_bits == 16
        return is_wanted and not config.key_norms and self.pages.used and self._shares_rows()

    def _make_packer(self, quantizer: Quantizer) -> Packer:
        return Packer(quantizer)

    def _kv_format(self) -> KVFormat:
        """What chunks look like in slow tiers."""
        shape = self.model.forward.shape
        return KVFormat(
            shape.num_layers,
            shape.num_kv_heads,
            shape.head_dim,
            shape.dtype,
            self._config.kv_cache_bits,
        )

    def _shares_rows(self) -> bool:
        """Whether running requests may read each other's rows."""
        return self.model.support.reuse_limit is None

    def _load_draft_model(self) -> DraftModel | None:
        if self._config.draft_model is None or self._config.speculate == "off":
            return None
        draft_model = DraftModel(self._config.draft_model, self.model)
        self.speculation.make_drafters = draft_model.make_drafters
        return draft_model

    def _use_slab(self, slab: Slab) -> None:
        """The first request is about to have pages."""
        from kvboost.model.paged.draft_steps import counted_rows
        from kvboost.reuse.paged.beside import RowsBeside
        from kvboost.reuse.paged.forwards import MOST_KEYS, SegmentForwards, SlabPages
        from kvboost.reuse.paged.kernels import GpuKernels
        from kvboost.reuse.paged.stored import PageStore

        forward = self.model.forward
        capture: Capture = NoCapture()
        if not forward.streams:
            config = self._config
            capture = make_capture(forward.shape.device, config.graphs, config.device_memory)
        forward.use_pages(slab, capture)
        if forward.steps is not None:
            kernels = GpuKernels(SlabPages(slab), self.rotation)
            heads = self.model.num_heads
            self._forwards = SegmentForwards(kernels, slab, heads, forward.run_rows, capture)
            forward.use_runner(self._forwards)
            self.cost.computed_rows = self._forwards.bucket_of
            self.cost.plain_rows, self.cost.drafted_rows = unpadded, counted_rows
            capacity = min(slab.most_rows, MOST_KEYS)
            forward.steps.beside = RowsBeside(kernels, slab, heads, capacity)
            if self._gpu_tier is not None and self.keeps_pages:
                self._gpu_tier.pages = self._page_store = PageStore(slab)
                slab.free_kept = self._free_pages
                slab.num_spare = slab.num_pages // SPARE_SHARE
                spare = partial(self._free_pages, 2 * slab.num_spare)
                slab.on_low = Aside(spare, "kvboost-pages").ask

    def _free_pages(self, number: int) -> None:
        """Evicts chunks until so many pages are free, as far as possible."""
        if (pages := self._page_store) is not None:
            with torch.inference_mode():
                self.store.free_gpu(lambda: pages.num_free >= number)

    def _leave_slab(self) -> None:
        """Frees the memory of requests. Graphs and what they run refer to one another, so that only
        a collection finds that nothing else needs them."""
        self.pool.clear()
        self.model.forward.leave_pages()
        if self._gpu_tier is not None:
            self._gpu_tier.pages = self._page_store = None
        if self._forwards is not None:
            self._forwards = None
            self.cost.computed_rows = unpadded
            self.cost.plain_rows = self.cost.drafted_rows = size_of
            gc.collect()
            if self.model.forward.shape.device.type == "cuda":
                torch.cuda.empty_cache()

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


def _kv_budget(config: EngineConfig, model: LoadedModel) -> int:
    """How many bytes the KV of running requests may take."""
    if config.max_kv_bytes is not None:
        return config.max_kv_bytes
    if model.device.type != "cuda":
        return int(memory_bytes() * MEMORY_SHARE) or 4 * 1024**3
    usual = int(torch.cuda.mem_get_info(model.device)[0] * 2 * MEMORY_SHARE)
    return usual if model.placement is None else min(usual, model.placement.plan.kv_bytes)


def rotation_of(model: LoadedModel) -> Rotation | None:
    """How keys rotate to another position; None if the model has no rotary positions."""
    if model.frequencies is None:
        return None
    interleaved = model.support.architecture.interleaved
    return Rotation(model.frequencies, interleaved=interleaved, kernel=move_keys)


def make_quantizer(
    model: LoadedModel, rotation: Rotation | None, ram: RamTier, bits: int, measures_keys: bool
) -> Quantizer:
    """Where the model runs on the CPU, packed rows are in the memory of ``ram`` at once."""
    own = ram.own if model.device.type == "cpu" else None
    return Quantizer(bits, rotation, own=own, measures_keys=measures_keys)
