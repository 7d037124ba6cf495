"""Requests and chunks in the pages of one slab: on NVIDIA GPUs. Rows run as CUDA graphs, those of
the usual sizes recorded when an engine starts and most others in idle time: recording takes longer
than any of them."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from functools import partial

import torch

from kvboost.cache.lookup.hits import KnownRows
from kvboost.cache.store import ChunkStore
from kvboost.cache.tiers.gpu import SPARE_SHARE
from kvboost.cache.tiers.ordered import Aside
from kvboost.model.execution.kv import Prefix, RequestKV
from kvboost.model.paged import draft_steps
from kvboost.model.paged.forward import PagedForward
from kvboost.model.paged.graphs import Capture, NoCapture, make_capture
from kvboost.model.paged.pool import PagedPool
from kvboost.model.paged.slab import Slab
from kvboost.model.paged.steps import bucket_of
from kvboost.progress import Progress
from kvboost.reuse.cost import CostModel, unpadded
from kvboost.reuse.paged.beside import RowsBeside
from kvboost.reuse.paged.forwards import MOST_KEYS, SegmentForwards, SlabPages
from kvboost.reuse.paged.graphs import SIZES
from kvboost.reuse.paged.hooks import PROBES, REPAIRS, ROWS, SCORED
from kvboost.reuse.paged.kernels import GpuKernels
from kvboost.reuse.paged.request import PagedRequest
from kvboost.reuse.paged.stored import PageStore
from kvboost.reuse.request import RequestRows
from kvboost.reuse.step_times import size_of
from kvboost.runtime.backend import Backend
from kvboost.runtime.scheduler import MOST_BESIDE_HEALING

log = logging.getLogger("kvboost")

TAILS = (64, 128, 256, 512, 1024, SIZES[-1])
"""Rows after a known beginning whose graphs are recorded at the start."""
REPAIRED = (256, 512, 768, 1024, 1280, SIZES[-1])
"""Rows of a repair: those of moved prompts of about 2,000 to 8,000 tokens, and of longer ones."""

Part = tuple[int, Callable[[], object]]
"""How many rows a graph has, and what records it."""


class PagedBackend(Backend):
    """The slab is made with the first request, and with it what runs rows in pages."""

    pool: PagedPool
    forwards: SegmentForwards | None = None
    """Runs rows of single requests over pages, once there are some."""
    _page_store: PageStore | None = None
    _paged: PagedForward | None = None

    def serve(self, store: ChunkStore, cost: CostModel) -> None:
        self._store, self._cost = store, cost

    @property
    def kept_bytes(self) -> int:
        """Chunks on the GPU are pages of ended requests: if there are to be some, with rows in full
        precision as they were computed, and if any prompt may use them."""
        config = self._config
        is_wanted = config.gpu_cache_bytes != 0 and not self._packs
        keeps = is_wanted and self.shares_rows
        return self._slab_bytes if keeps else 0

    @property
    def _slab_bytes(self) -> int:
        """Near rows of requests with far rows are not in pages."""
        return self.max_kv_bytes - self._near_bytes

    def rows_of(self, kv: RequestKV) -> RequestRows:
        forwards = self.forwards
        if forwards is None or kv.slab is not forwards.slab:
            return super().rows_of(kv)
        most = forwards.most_rows
        return PagedRequest(kv, forwards.kernels, self.packer, most, self._page_store)

    def kept_prefix(self, known: KnownRows, most_rows: int) -> Prefix | None:
        if self._page_store is None or not known.exact:
            return None
        stored = self._store.at_hand(known.exact)
        return self._page_store.prefix(known.exact, stored, most_rows)

    def notes(self, *, has_adapters: bool) -> list[str]:
        found: list[str | None] = []
        if self._paged is not None and self.forwards is not None:
            layers = self._paged.layers
            found = [self._paged.steps.capture.note, layers.note if layers else None]
            found.append(self.forwards.note)
        if self.model.placement is not None:
            found.append(self.model.placement.note)
        if has_adapters:
            found.append("prompts with adapters are read without CUDA graphs and fused layers")
        here = [note for note in found if note is not None] if self.device.gpu is not None else []
        return super().notes(has_adapters=has_adapters) + here

    def close(self) -> None:
        """Releases pages and graphs. Graphs and what they run refer to one another, so only
        Python's garbage collector can free them."""
        self.pool.clear()
        self.forward = self.model.forward
        if self.tiers.gpu is not None:
            self.tiers.gpu.pages = self._page_store = None
        if self._paged is not None:
            self._paged.close()
            self._paged = self.forwards = None
            self._cost.computed_rows = unpadded
            self._cost.plain_rows = self._cost.drafted_rows = size_of
            gc.collect()
            torch.cuda.empty_cache()
        super().close()

    def record_graphs(self, max_running: int) -> int:
        """Records decode steps, those with drafts, the usual rows after known text, and what moved
        text takes, until half of the memory for graphs is used. Other sizes are recorded in idle
        time, once they were needed."""
        self.pool.prepare()
        paged = self._paged
        if paged is None or not paged.steps.capture.has_room:
            return 0
        parts = self._parts(paged, max_running)
        with (
            Progress("recording CUDA graphs", only_on_terminal=True) as progress,
            progress.step("steps, prompts and repairs", total=len(parts)) as step,
        ):
            # The largest first: the others then fit into its memory.
            for rows, record in sorted(parts, key=lambda part: -part[0]):
                if not paged.steps.capture.has_room:
                    break
                try:
                    paged.exclusively(record)
                except Exception as error:  # the request that needs it will tell
                    log.warning("no graph of %d rows was recorded at the start: %s", rows, error)
                step.advance()
        return paged.num_graphs

    @property
    def lacks_graphs(self) -> bool:
        if self._paged is None or self.forwards is None:
            return False
        return self.forwards.is_missing_some and self._paged.steps.capture.has_room

    def record_missing(self, stop: Callable[[], bool] = lambda: False) -> None:
        while self.lacks_graphs and not stop():
            assert self._paged is not None and self.forwards is not None
            self._paged.exclusively(self.forwards.record_missing)

    def _parts(self, paged: PagedForward, max_running: int) -> list[Part]:
        steps, forwards = paged.steps, self.forwards
        assert forwards is not None
        sizes = {bucket_of(requests) for requests in range(1, max_running + 1)}
        parts: list[Part] = [(size, partial(steps.record, size)) for size in sizes]
        if self._config.speculate != "off":
            parts += [(size, partial(steps.drafts.record, size)) for size in draft_steps.SIZES]
        wanted = {(ROWS, rows) for rows in TAILS}
        if self.rotation is not None:
            for size in {bucket_of(requests) for requests in range(1, MOST_BESIDE_HEALING + 1)}:
                rows = steps.beside_rows + size
                parts.append((rows, partial(steps.record, size, with_beside=True)))
            parts.append((0, forwards.compile_kernels))
            wanted |= {(REPAIRS, rows) for rows in REPAIRED} | {(PROBES, 0)}
            wanted.add((SCORED, steps.beside_rows))  # the last ones that heal during an answer
        made = {(kind, forwards.size_for(kind, rows)) for kind, rows in wanted}
        kept = [(kind, size) for kind, size in made if size <= forwards.most_rows]
        return parts + [(size, partial(forwards.record, kind, size)) for kind, size in kept]

    def _make_pool(self) -> PagedPool:
        return PagedPool(
            self.model.forward.uniform_shape,
            self._slab_bytes,
            self._config.max_running,
            self.model.context_length,
            on_slab=self._use_slab,
            keeps=self.kept_bytes > 0,
        )

    def _use_slab(self, slab: Slab) -> None:
        """The first request is about to have pages."""
        forward, config = self.model.forward, self._config
        if not forward.takes_steps:
            return
        capture: Capture = NoCapture()
        if not forward.streams:
            capture = make_capture(slab.shape.device, config.graphs, config.device_memory)
        paged = PagedForward(forward, slab, capture)
        rotation = None if self.rotation is None else self.rotation.groups[0]
        kernels, heads = GpuKernels(SlabPages(slab), rotation), self.model.num_heads
        self.forwards = SegmentForwards(kernels, slab, heads, forward.run_rows, capture)
        paged.runner = self.forwards
        capacity = min(slab.most_rows, MOST_KEYS)
        paged.steps.beside = RowsBeside(kernels, slab, heads, capacity)
        self.forward = self._paged = paged
        self._cost.computed_rows = self.forwards.bucket_of
        self._cost.plain_rows, self._cost.drafted_rows = unpadded, draft_steps.counted_rows
        if self.tiers.gpu is not None and self.kept_bytes:
            self.tiers.gpu.pages = self._page_store = PageStore(slab)
            slab.free_kept = self._free_pages
            slab.num_spare = slab.num_pages // SPARE_SHARE
            spare = partial(self._spare_pages, 2 * slab.num_spare)
            slab.on_low = self.tiers.gpu.on_low = Aside(spare, "kvboost-pages").ask

    def _free_pages(self, number: int) -> None:
        """Evicts chunks until so many pages are free, as far as possible."""
        if (pages := self._page_store) is not None:
            self._store.free_gpu(lambda: pages.num_free >= number)

    def _spare_pages(self, number: int) -> None:
        """Evicts chunks until so many pages are free, and twice the part of the budget that is kept
        free."""
        pages, tier = self._page_store, self.tiers.gpu
        if pages is not None and tier is not None:
            with torch.inference_mode():  # this is another thread than that of requests
                self._store.free_gpu(lambda: tier.has_spare(2) and pages.num_free >= number)
