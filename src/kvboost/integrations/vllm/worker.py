"""The workers' side: puts known rows into vLLM's pages, repairs moved ones, and keeps new ones.

All work on pages happens in the thread that runs vLLM's model; one thread of our own moves chunks
between memory and the slow tiers.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from kvboost.cache.chunk import ChunkInfo, KVChunk
from kvboost.cache.data import ChunkData
from kvboost.cache.lookup.hits import Hit
from kvboost.cache.quantize import KVFormat, Quantizer, plain
from kvboost.cache.tiers.open import open_tiers
from kvboost.cache.tiers.stats import TierStats
from kvboost.errors import UnsupportedModelError
from kvboost.integrations.vllm import check, rope
from kvboost.integrations.vllm.messages import Greeting, Report, Step
from kvboost.integrations.vllm.options import Options
from kvboost.integrations.vllm.pages import Pages
from kvboost.integrations.vllm.planner import Hello, Keep, Load
from kvboost.integrations.vllm.ranks import Ranks
from kvboost.integrations.vllm.repair import SCRATCH_PAGE, WAITS, Loading, Repairer
from kvboost.integrations.vllm.sparse import SparseForward, find_runner
from kvboost.integrations.vllm.support import why_not_moved
from kvboost.model import triton
from kvboost.model.fingerprint import fingerprint
from kvboost.model.triton.host import one_thread, to_device
from kvboost.reuse.rope import Rotation

if TYPE_CHECKING:
    from kvboost.integrations.vllm.commands import Reply
    from kvboost.reuse.paged.kernels import GpuKernels

PLACED_ROWS = 4096
"""Rows that are put into pages together: a copy of them is made on the device."""
KEPT_ROWS = 4096
"""Rows that are copied out of pages together."""
MEASURED_ROWS = {"cuda": 2048, "cpu": 128}
"""The largest forward that is timed at the start."""

logger = init_logger("vllm.kvboost")


class Lost(Exception):
    """A planned chunk is not there any more."""


class Worker:
    """``declined`` says why nothing is reused; it is None if something is."""

    def __init__(self, config: VllmConfig, options: Options, declined: str | None) -> None:
        self._config = config
        self._declined = declined
        self._options = options
        self._pages: Pages | None = None
        self._problem = "no KV cache was registered"
        self._loading: dict[str, tuple[Load, Loading]] = {}
        self._received: set[str] = set()
        self._failed_pages: set[int] = set()
        self._report = Report()
        self._tiers: dict[str, TierStats] = {}
        self._orders: dict[str, Future[Reply]] = {}
        self._thread = ThreadPoolExecutor(1, "kvboost-data")
        self._stream: torch.cuda.Stream | None = None
        self._rotation: Rotation | None = None
        self._kernels: GpuKernels | None = None
        self._repairer: Repairer | None = None

    # At the start.

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """vLLM has allocated its pages."""
        try:
            if self._declined is not None:
                raise UnsupportedModelError(self._declined)
            layers = self._config.compilation_config.static_forward_context
            self._runner = find_runner()
            self._pages = Pages(caches, [layers[name] for name in caches])
        except (UnsupportedModelError, KeyError, AttributeError) as error:
            self._problem = str(error)

    def greet(self) -> Greeting:
        """Checks and measures; called once, when vLLM is ready and before any request."""
        self._ranks = Ranks(get_tp_group())
        if self._ranks.least(self._pages is not None) == 0 or self._pages is None:
            if self._pages is not None:
                self._pages, self._problem = None, "another worker has a problem"
            logger.warning("KVBoost reuses nothing: %s", self._problem)
            return Greeting(None)
        pages, model = self._pages, self._runner.model
        parallel = self._config.parallel_config
        hello = Hello(
            fingerprint(
                model,
                self._config.model_config.hf_text_config,
                dtype=str(pages.dtype),
                rank=parallel.rank,
                size=parallel.tensor_parallel_size,
            ),
            Path(self._config.model_config.model).name,
            pages.row_bytes,
        )
        vocab = self._config.model_config.get_vocab_size()
        try:
            problem = why_not_moved(self._config, pages.layers)
            self._rotation = rope.rotation(model, len(pages.caches))
            self._kernels = _gpu_kernels(pages, self._rotation)
            self._forward = SparseForward(
                self._runner, self._config, pages, self._kernels, graphs=problem is None
            )
            self._repairer = Repairer(
                pages, self._forward, self._rotation, self._kernels, self._ranks
            )
            if problem is None and self._options.self_check:
                problem = check.find_problem(
                    pages, self._forward, self._rotation, vocab, self._ranks
                )
        except UnsupportedModelError as error:
            problem = str(error)
        if problem is None:
            rows = min(MEASURED_ROWS[pages.device.type], (pages.num_blocks - 1) * pages.size)
            measured = check.measure(pages, self._forward, vocab, rows)
            hello = replace(hello, measured=tuple(measured))
        else:
            logger.warning("KVBoost reuses exact text only, moved text is off: %s", problem)
            hello = replace(hello, moved_problem=problem)
        config = self._options.engine_of(parallel.rank, parallel.tensor_parallel_size)
        tiers = open_tiers(config, pages.device)
        format = KVFormat(len(pages.caches), pages.num_kv_heads, pages.head_dim, pages.dtype)
        self._data = ChunkData(tiers, format=format)
        self._packer = Quantizer(16, self._rotation)
        if pages.device.type == "cuda":
            self._stream = torch.cuda.Stream(pages.device)
        return Greeting(hello)

    @property
    def _open_pages(self) -> Pages:
        assert self._pages is not None
        return self._pages

    # In every step.

    def step(self, step: Step) -> None:
        """Starts the loads of a step, and goes on with all of them: to the end if no other request
        computes, else for ``slice_rows``."""
        for request_id in step.cancelled:
            if self._loading.pop(request_id, None) is not None:
                self._received.add(request_id)
        if step.dropped:
            self._thread.submit(self._data.drop, step.dropped)
        for order in step.orders:
            self._orders[order.request_id] = self._thread.submit(order.obey, self._data)
        for load in step.loads:
            self._loading[load.request_id] = (load, self._serve(load))
        with one_thread() if self._kernels is not None else nullcontext():
            if step.is_busy:
                self._go_on(self._options.slice_rows, waits=False)
            else:
                if len(self._loading) > 1:  # one waits while the others go on
                    self._go_on(None, waits=False)
                self._go_on(None, waits=True)

    def _go_on(self, budget: int | None, *, waits: bool) -> None:
        for request_id, (load, serving) in list(self._loading.items()):
            if budget is not None and budget <= 0:
                break
            rows, has_ended = self._advance(load, serving, budget, waits)
            budget = None if budget is None else budget - rows
            if has_ended:
                del self._loading[request_id]
                self._received.add(request_id)

    def take_received(self) -> set[str]:
        """Requests whose rows have arrived."""
        received, self._received = self._received, set()
        return received

    def take_failed_pages(self) -> set[int]:
        failed, self._failed_pages = self._failed_pages, set()
        return failed

    def take_report(self) -> Report | None:
        report, self._report = self._report, Report()
        if (repairer := self._repairer) is not None:
            report.recomputed, repairer.recomputed = repairer.recomputed, {}
            report.measured, repairer.measured = repairer.measured, []
        if self._pages is not None:
            report.gone = set(self._data.take_gone())
            if (tiers := self._data.stats()) != self._tiers:
                self._tiers = tiers
                report.tiers = {self._config.parallel_config.rank: tiers}
            for request_id in [one for one, reply in self._orders.items() if reply.done()]:
                report.replies[request_id] = [self._orders.pop(request_id).result()]
        return None if report == Report() else report

    def close(self) -> None:
        if self._pages is not None and hasattr(self, "_data"):
            self._thread.shutdown()
            self._data.close()
            self._pages = None

    # Loading.

    def _advance(
        self, load: Load, serving: Loading, budget: int | None, waits: bool
    ) -> tuple[int, bool]:
        """Goes on with a load for ``budget`` rows, and beyond where it ``waits``; returns the rows
        it has computed, and whether it has ended. A load that fails is computed by vLLM: its pages
        are reported."""
        rows = 0
        try:
            while budget is None or rows < budget:
                computed = next(serving)
                if computed == WAITS and not waits:
                    return rows, False
                rows += computed
            return rows, False
        except StopIteration:
            return rows, True
        except Lost:
            self._failed_pages.update(load.pages[load.first // self._open_pages.size :])
            self._report.failed.add(load.request_id)
            return rows, True

    def _serve(self, load: Load) -> Loading:
        """Fetch, place, and for moved text choose and repair."""
        chunks = yield from self._fetch(load)
        table = to_device([*load.pages, SCRATCH_PAGE], torch.int64, self._open_pages.device)
        self._place(load, chunks, table)
        if load.moved:
            assert self._repairer is not None
            yield from self._repairer.repair(load, table, self._options.slice_rows)

    def _fetch(self, load: Load) -> Generator[int, None, list[KVChunk]]:
        """Raises ``Lost`` unless every worker has its heads of every chunk. All of them go on in
        the same step: the forwards that follow run in all of them together."""
        if self._data.is_ready([info.key for info in load.infos]):
            chunks, coming = self._data.fetch(load.infos), None
        else:
            chunks, coming = None, self._thread.submit(self._data.fetch, load.infos)
        while self._ranks.least(coming is None or coming.done()) == 0:
            yield WAITS
            time.sleep(0.0005)
        if coming is not None:
            chunks = coming.result()
        if self._ranks.least(chunks is not None) == 0 or chunks is None:
            raise Lost(load.request_id)
        return chunks

    def _place(self, load: Load, chunks: Sequence[KVChunk], table: torch.Tensor) -> None:
        """Writes the known rows into the pages of ``table``, keys of moved ones rotated, and mixes
        further copies with them."""
        for number, hits in enumerate((load.hits, *load.copies), start=1):
            share = None if number == 1 else 1 / number
            for batch in _batches(hits, PLACED_ROWS):
                some, chunks = chunks[: len(batch)], chunks[len(batch) :]
                if self._kernels is not None:
                    self._kernels.place(batch, some, table, share)
                else:
                    self._place_with_torch(batch, some, table, share)

    def _place_with_torch(
        self,
        hits: Sequence[Hit],
        chunks: Sequence[KVChunk],
        table: torch.Tensor,
        share: float | None,
    ) -> None:
        pages = self._open_pages
        buffer = torch.empty(
            (
                2,
                len(pages.caches),
                pages.num_kv_heads,
                sum(hit.num_tokens for hit in hits),
                pages.head_dim,
            ),
            dtype=pages.dtype,
            device=pages.device,
        )
        row = 0
        for hit, chunk in zip(hits, chunks, strict=True):
            out = buffer[:, :, :, row : row + hit.num_tokens]
            self._packer.place(chunk.data, hit.chunk.base_position, hit.offset, hit.start, out)
            row += hit.num_tokens
        positions = np.concatenate([np.arange(hit.start, hit.end) for hit in hits])
        slots = pages.slots(table, torch.from_numpy(positions).to(pages.device))
        if share is not None:
            buffer.lerp_(pages.read_all(slots), 1 - share)
        pages.write_all(buffer, slots)

    # Keeping.

    def keep(self, keep: Keep) -> None:
        """Copies new rows out of the pages of a request that has ended. vLLM has freed them, so
        this must come before anything that the next step writes; on a GPU, later writes are
        ordered after these reads."""
        pages = self._open_pages
        table = to_device(keep.pages, torch.int64, pages.device)
        for infos in _batches(keep.infos, KEPT_ROWS):
            rows = np.concatenate([np.arange(one.base_position, one.end) for one in infos])
            slots = pages.slots(table, to_device(rows, torch.int64, pages.device))
            kv = pages.read_all(slots)
            ready = None
            if self._stream is not None:
                ready = torch.cuda.Event()
                ready.record()
            self._thread.submit(self._put, infos, kv, ready)

    def _put(
        self, infos: Sequence[ChunkInfo], kv: torch.Tensor, ready: torch.cuda.Event | None
    ) -> None:
        """Runs in our thread."""
        with torch.cuda.stream(self._stream) if self._stream is not None else nullcontext():
            if ready is not None:
                ready.wait()
            chunks, row = [], 0
            for info in infos:
                rows = kv[:, :, :, row : row + info.num_tokens].contiguous()
                chunks.append(KVChunk(replace(info, nbytes=rows.nbytes), plain(rows)))
                row += info.num_tokens
            self._data.put(chunks)
            if self._stream is not None:
                self._stream.synchronize()


def _gpu_kernels(pages: Pages, rotation: Rotation) -> GpuKernels | None:
    """Our kernels, where they serve these pages."""
    if pages.device.type != "cuda" or not pages.is_plain or not triton.is_available():
        return None
    from kvboost.reuse.paged.kernels import GpuKernels

    kernels = GpuKernels(pages, rotation)
    kernels.warm_up(pages.layers[0].impl.num_heads)
    return kernels


class _Counted(Protocol):
    @property
    def num_tokens(self) -> int: ...


Some = TypeVar("Some", bound=_Counted)


def _batches(pieces: Sequence[Some], most_rows: int) -> list[list[Some]]:
    """``pieces`` in order, so that those of one batch have at most ``most_rows`` rows together."""
    batches: list[list[Some]] = []
    rows = 0
    for piece in pieces:
        if not batches or rows + piece.num_tokens > most_rows:
            batches.append([])
            rows = 0
        batches[-1].append(piece)
        rows += piece.num_tokens
    return batches
