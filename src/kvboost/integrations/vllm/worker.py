"""The workers' side: puts known rows into vLLM's pages, repairs moved ones, and keeps new ones.

All work on pages happens in the thread and in the order in which vLLM's model runs, after the
forward of each step was launched, so that a GPU has work meanwhile. One thread of our own moves
chunks between the slow tiers, host memory and the GPU.
"""

from __future__ import annotations

import re
import sys
import time
from collections import deque
from collections.abc import Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tp_group
from vllm.logger import init_logger

from kvboost.cache.chunk import ChunkInfo, KVChunk
from kvboost.cache.data import ChunkData
from kvboost.cache.mixed import AnyFormat, MixedFormat, states_of
from kvboost.cache.quantize import KVFormat, Quantizer
from kvboost.cache.states import rows_only
from kvboost.cache.tiers.open import open_tiers
from kvboost.errors import UnsupportedModelError
from kvboost.integrations.vllm import check, rope
from kvboost.integrations.vllm.groups import Groups
from kvboost.integrations.vllm.messages import Greeting, Report, Step
from kvboost.integrations.vllm.options import Options
from kvboost.integrations.vllm.pages import Pages, check_sizes, tensors_of
from kvboost.integrations.vllm.placing import place, rows_of
from kvboost.integrations.vllm.planner import Hello, Keep, Load
from kvboost.integrations.vllm.ranks import Ranks
from kvboost.integrations.vllm.repair import SCRATCH_PAGE, WAITS, Loading, Repairer
from kvboost.integrations.vllm.sparse import SparseForward, find_runner
from kvboost.integrations.vllm.states import StatePages
from kvboost.integrations.vllm.support import why_not_moved
from kvboost.integrations.vllm.taking import (
    COPIED_ROWS,
    Taken,
    batches,
    chunks_of,
    copied,
    pages_of,
    take_together,
)
from kvboost.model import triton
from kvboost.model.execution.host_memory import host_memory
from kvboost.model.loading.fingerprint import fingerprint
from kvboost.model.triton.host import one_thread, send, to_device
from kvboost.reuse.rope import Rotation

if TYPE_CHECKING:
    from kvboost.integrations.vllm.commands import Reply
    from kvboost.reuse.paged.kernels import GpuKernels

AHEAD_ROWS = 2 * COPIED_ROWS
"""Rows that may be copied to a GPU, on a stream of their own, before they are put into pages."""
MEASURED_ROWS, MEASURED_ON_CPU = 2048, 128
"""The largest forward that is timed at the start."""

logger = init_logger("vllm.kvboost")

Brought = tuple["list[KVChunk] | None", "torch.cuda.Event | None"]
"""Chunks, None if one is lost, and what must have happened before they are read."""
Fetching = Generator[int, None, "list[KVChunk]"]
"""Yields ``WAITS``; returns the chunks, or raises ``Lost``."""


class Lost(Exception):
    """A planned chunk is not there any more."""


class Worker:
    """``declined`` says why nothing is reused; it is None if something is."""

    def __init__(
        self, config: VllmConfig, options: Options, declined: str | None, groups: Groups
    ) -> None:
        self.config = config
        self._declined = declined
        self.groups = groups
        self.options = options
        self.pages: Pages | None = None
        self.states: StatePages | None = None
        self.problem = "no KV cache was registered"
        self.loading: dict[str, tuple[Load, Loading]] = {}
        self._fetching: dict[str, tuple[Load, Fetching]] = {}
        self.held: dict[str, list[KVChunk]] = {}
        """Chunks of loads for which vLLM has no pages yet, by request."""
        self._failed_pages: set[int] = set()
        self.report = Report()
        self._filled: list[tuple[int, int]] = []
        """What the tiers held when the scheduler was last told."""
        self._orders: dict[str, Future[Reply]] = {}
        self.thread = ThreadPoolExecutor(1, "kvboost-data")
        self._stream: torch.cuda.Stream | None = None
        """Of our thread, on a GPU."""
        self.is_near = True
        """Whether chunks in memory are in that of the pages, as a rule."""
        self.ahead: dict[str, int] = {}
        """Rows on a GPU that are not put into pages yet, by request."""
        self._passing: deque[tuple[torch.cuda.Event, list[KVChunk]]] = deque()
        """Chunks that a GPU may still be reading."""
        self.rotation: Rotation | None = None
        self._kernels: GpuKernels | None = None
        self.repairer: Repairer | None = None

    # At the start.

    def register(self, caches: Mapping[str, torch.Tensor]) -> None:
        """vLLM has allocated its pages."""
        try:
            if self._declined is not None:
                raise UnsupportedModelError(self._declined)
            layers = self.config.compilation_config.static_forward_context
            self._runner = find_runner()
            self.states = self._find_states(layers)
            # Several groups are not in this order.
            names = sorted(caches.keys() - self.groups.stateful, key=_layer_number)
            shared = "kv_sharing_target_layer_name"
            self.pages = Pages(
                {name: caches[name] for name in names},
                [layers[name] for name in names],
                self.groups.layers({name: getattr(layers[name], shared, None) for name in names}),
            )
            if (page := self.groups.page) is not None:
                check_sizes(page, self.pages)
        except (UnsupportedModelError, KeyError, AttributeError) as error:
            self.pages, self.problem = None, str(error)

    def _find_states(self, layers: Mapping[str, object]) -> StatePages | None:
        stateful = self.groups.stateful
        names = sorted(stateful, key=_layer_number)
        if not names:
            return None
        return StatePages([(stateful[name], tensors_of(layers[name])) for name in names])

    def greet(self) -> Greeting:
        """Checks and measures; called once, when vLLM is ready and before any request."""
        self.ranks = Ranks(get_tp_group())
        if self.ranks.least(self.pages is not None) == 0 or self.pages is None:
            if self.pages is not None:
                self.pages, self.problem = None, "another worker has a problem"
            logger.warning("KVBoost reuses nothing: %s", self.problem)
            return Greeting(None)
        pages, model, config = self.pages, self._runner.model, self.config.model_config
        vocab, text, dtype = config.get_vocab_size(), config.hf_text_config, str(pages.dtype)
        rank = self.config.parallel_config.rank
        size = self.config.parallel_config.tensor_parallel_size
        more = {} if self.states is None else {"states": str(self.states.shapes)}
        weights = fingerprint(model, text, dtype=dtype, rank=rank, size=size, **more)
        state_rows = 0 if self.states is None else -(-self.states.nbytes // pages.row_bytes)
        hello = Hello(weights, Path(config.model).name, pages.row_bytes, state_rows)
        problem = why_not_moved(self.config, pages.layers, self.groups)
        try:
            rotation = self.rotation = rope.rotation(model, pages.layers)
            if self.groups.is_one:  # they take one table
                self._kernels = _gpu_kernels(pages, rotation)
            kernels = self._kernels
            forward = self.forward = SparseForward(
                self._runner, self.config, pages, kernels, graphs=problem is None
            )
            self.repairer = Repairer(pages, forward, rotation, kernels, self.ranks)
            if problem is None and self.options.self_check:
                problem = check.find_problem(pages, forward, rotation, vocab, self.ranks)
        except UnsupportedModelError as error:
            problem = problem or str(error)
        if problem is None:
            most = MEASURED_ROWS if pages.on_gpu else MEASURED_ON_CPU
            rows = min(most, (pages.num_blocks - 1) * pages.size)
            measured = check.measure(pages, self.forward, vocab, rows)
            hello = replace(hello, measured=tuple(measured))
        else:
            logger.warning("KVBoost reuses exact text only, moved text is off: %s", problem)
            hello = replace(hello, moved_problem=problem)
        streams = []
        if pages.on_gpu:
            self._stream = torch.cuda.Stream(pages.device)
            streams = [torch.cuda.current_stream(), self._stream]
        locked = host_memory if pages.on_gpu else None
        tiers = open_tiers(
            self.options.engine_of(rank, size), pages.device, locked, streams=streams
        )
        of_rows = KVFormat(len(pages.caches), pages.num_kv_heads, pages.head_dim, pages.dtype)
        format: AnyFormat = of_rows
        if self.states is not None:
            format = MixedFormat((of_rows,), self.states.shapes)
        self.data = ChunkData(tiers, format=format, state_every=state_rows or None)
        self.is_near = tiers.gpu is not None or not pages.on_gpu
        self.packer = Quantizer(16, self.rotation)
        return Greeting(hello)

    @property
    def open_pages(self) -> Pages:
        assert self.pages is not None
        return self.pages

    # In every step.

    def step(self, step: Step) -> set[str]:
        """Starts the loads of a step, and goes on with all of them: to the end if there is only one
        and no other request computes, else for ``slice_rows``. Called when vLLM has launched what
        it computes in this step. Returns requests whose rows have arrived, or will not."""
        if not (step.has_work or self.loading or self._fetching or self._passing):
            return set()
        under_way = {*self.loading, *(load.request_id for load in step.loads)}
        for request_id in step.cancelled:
            self.loading.pop(request_id, None)
            self._fetching.pop(request_id, None)
            self.held.pop(request_id, None)
            self.ahead.pop(request_id, None)
        while self._passing and self._passing[0][0].query():
            self._passing.popleft()
        if step.dropped:
            self.thread.submit(self.data.drop, step.dropped)
        if self.states is not None:  # after that: chunks with states replace those without
            self.keep(step.keeps)
        for order in step.orders:
            self._orders[order.request_id] = self.thread.submit(order.obey, self.data)
        # New ones first: what others wait for, say a probe, is done meanwhile.
        turns = [*(load.request_id for load in step.loads), *self.loading]
        for load in step.loads:
            self.loading[load.request_id] = (load, self._serve(load))
        if self.loading:
            with one_thread() if self._kernels is not None else nullcontext():
                is_alone = len(self.loading) == 1 and not step.is_busy
                budget = sys.maxsize if is_alone else self.options.slice_rows
                if is_alone or not (self._go_on(turns, budget, waits=False) or step.is_busy):
                    self._go_on(turns, budget, waits=True)
        self._fetching |= {load.request_id: (load, self._fetch(load)) for load in step.fetches}
        for load, fetching in list(self._fetching.values()):
            self._go_on_fetching(load, fetching)
        return under_way - self.loading.keys()

    def _go_on_fetching(self, load: Load, fetching: Fetching) -> None:
        request_id = load.request_id
        try:
            next(fetching)
        except StopIteration as end:
            self.held[request_id] = end.value
            self.report.fetched.add(load.name)
        except Lost:
            self.report.failed.add(load.name)
        else:
            return
        del self._fetching[request_id]

    def _go_on(self, turns: Iterable[str], budget: int, *, waits: bool) -> bool:
        """Whether a load has ended."""
        before = len(self.loading)
        for request_id in turns:
            if budget <= 0:
                break
            if request_id not in self.loading:
                continue
            rows, has_ended = self._advance(*self.loading[request_id], budget, waits)
            budget -= rows
            if has_ended:
                del self.loading[request_id]
        return len(self.loading) < before

    def take_failed_pages(self) -> set[int]:
        failed, self._failed_pages = self._failed_pages, set()
        return failed

    def take_report(self) -> Report | None:
        report = self.report
        if (repairer := self.repairer) is not None:
            report.recomputed, repairer.recomputed = repairer.recomputed, {}
            report.measured, repairer.measured = repairer.measured, []
        if self.pages is not None:
            report.gone.update(self.data.take_gone())
            if (filled := self.data.filled()) != self._filled:
                self._filled = filled
                report.tiers = {self.config.parallel_config.rank: self.data.stats()}
            for request_id in [one for one, reply in self._orders.items() if reply.done()]:
                report.replies[request_id] = [self._orders.pop(request_id).result()]
        if not any(vars(report).values()):
            return None
        self.report = Report()
        return report

    def close(self) -> None:
        if self.pages is not None and hasattr(self, "data"):
            self.thread.shutdown()
            self.data.close()
            self.pages = None

    # Loading.

    def _advance(self, load: Load, serving: Loading, budget: int, waits: bool) -> tuple[int, bool]:
        """Goes on with a load for ``budget`` rows, and beyond where it ``waits``; returns the rows
        it has computed, and whether it has ended. A load that fails is computed by vLLM: its pages
        are reported."""
        rows = 0
        try:
            while rows < budget:
                computed = next(serving)
                if computed == WAITS:
                    if not waits:
                        return rows, False
                    time.sleep(0.0002)
                rows += computed
            return rows, False
        except StopIteration:
            return rows, True
        except Lost:
            self._failed_pages.update(load.tables[0][load.first // self.open_pages.size :])
            self.report.failed.add(load.name)
            return rows, True

    def _serve(self, load: Load) -> Loading:
        """Fetch, place, and for moved text choose and repair."""
        chunks = self.held.pop(load.request_id, None)
        if chunks is None:
            chunks = yield from self._fetch(load)
        tables = [
            to_device([*table, SCRATCH_PAGE], torch.int64, self.open_pages.device)
            for table in load.tables
        ]
        place(load, chunks, tables, self.open_pages, self.packer, self._kernels)
        if self.states is not None:
            page = load.end // self.open_pages.size - 1
            self.states.write(states_of(chunks[-1].data), load.tables, page)
        self.ahead.pop(load.request_id, None)
        if self.open_pages.on_gpu:
            self._passing.append((torch.cuda.current_stream().record_event(), chunks))
        if load.plan.moved:
            assert self.repairer is not None
            yield from self.repairer.repair(load, tables[0], self.options.slice_rows)

    def _fetch(self, load: Load) -> Fetching:
        """Raises ``Lost`` unless every worker has its heads of every chunk. All of them go on in
        the same step: the forwards that follow run in all of them together."""
        infos = load.infos
        coming: Future[Brought] = Future()
        if self.is_near and (here := self.data.at_hand(infos)) is not None:
            # Our thread may have brought some of them for another load, and may be at it still.
            brought = None if self._stream is None else self._stream.record_event()
            coming.set_result((here, brought))
        else:
            rows = sum(info.num_tokens for info in infos)
            if is_ahead := rows + sum(self.ahead.values()) <= AHEAD_ROWS:
                self.ahead[load.request_id] = rows
            coming = self.thread.submit(self._bring, infos, is_ahead)
        while self.ranks.least(coming.done()) == 0:
            yield WAITS
        chunks, arrived = coming.result()
        if self.states is not None and chunks is not None and not states_of(chunks[-1].data):
            # Another process has stored it without them.
            self.thread.submit(self.data.drop, [chunks[-1].key])
            self.report.gone.add(chunks[-1].key)
            chunks = None
        if self.ranks.least(chunks is not None) == 0 or chunks is None:
            self.ahead.pop(load.request_id, None)
            raise Lost(load.request_id)
        if arrived is not None:
            arrived.wait()
        return chunks

    def _bring(self, infos: Sequence[ChunkInfo], is_ahead: bool) -> Brought:
        """The chunks, from slow tiers or on their way to a GPU, with the event that ends the copy.
        Runs in our thread."""
        device = self.open_pages.device
        with torch.cuda.stream(self._stream):
            chunks = self.data.fetch(infos)
            if chunks is None:
                return None, None
            for number, one in enumerate(chunks[:-1]):
                if one.info.has_state:  # states are needed at the end of a load only
                    chunks[number] = rows_only(one)
            if self._stream is None:
                return chunks, None
            if is_ahead:
                with suppress(torch.OutOfMemoryError):  # then they are copied as they are placed
                    chunks = [
                        replace(one, data=one.data.map(lambda rows: send(rows, device)))
                        for one in chunks
                    ]
            return chunks, self._stream.record_event()

    # Keeping.

    def keep(self, keeps: Sequence[Keep]) -> None:
        """Copies new rows out of the pages of requests that have ended, and rows that leave a
        window. vLLM has freed them, so this must come before anything that the next step writes; on
        a GPU, later writes are ordered after these reads. Of a model with states, rows are kept
        while a request runs: when the step that computes them has been launched."""
        if not keeps:
            return
        try:
            taken = self._take(keeps)
        except torch.OutOfMemoryError:
            self.report.gone.update(info.key for keep in keeps for info in keep.infos)
            return
        on_gpu = self.open_pages.on_gpu
        ready = torch.cuda.current_stream().record_event() if on_gpu else None
        self.thread.submit(self._put, taken, ready)

    def _take(self, keeps: Sequence[Keep]) -> list[Taken]:
        pages = self.open_pages
        if self._kernels is not None:
            return take_together(self._kernels, keeps)
        return [
            (
                infos,
                partial(self._rows_of, copied(pages, keep, infos), keep, infos),
                self._states_after(keep, infos[-1]),
            )
            for keep in keeps
            for infos in batches(keep.infos, COPIED_ROWS)
        ]

    def _states_after(self, keep: Keep, info: ChunkInfo) -> list[torch.Tensor]:
        if self.states is None or not info.has_state:
            return []
        return self.states.read(keep.tables, info.end // self.open_pages.size - 1)

    def _rows_of(
        self, pages_then: torch.Tensor, keep: Keep, infos: Sequence[ChunkInfo]
    ) -> list[torch.Tensor]:
        """The rows of chunks whose pages were copied to ``pages_then``, in the order of chunks.
        Runs in our thread. Raises ``Lost`` if rows that were not in pages are not stored any
        more."""
        pages = self.open_pages
        start = pages_of(infos, pages.size, keep.first).start * pages.size
        found = []
        for info in infos:
            first = min(max(info.base_position, keep.first), info.end)
            rows = pages.rows_of(pages_then, first - start, info.end - start)
            if first > info.base_position:
                rows = torch.cat([self._stored(keep, info.base_position, first), rows], dim=3)
            found.append(rows.contiguous())
        return found

    def _stored(self, keep: Keep, start: int, end: int) -> torch.Tensor:
        """Rows ``[start, end)`` of a request, from its stored chunks."""
        hits = [hit.clip(start, end) for hit in keep.earlier if hit.start < end and hit.end > start]
        chunks = self.data.fetch([hit.chunk for hit in hits])
        if chunks is None:
            raise Lost(hits[0].chunk.key)
        stored = [(hit, chunk.data) for hit, chunk in zip(hits, chunks, strict=True)]
        return rows_of(stored, self.open_pages, self.packer)

    def _put(self, taken: list[Taken], ready: torch.cuda.Event | None) -> None:
        """Runs in our thread. Empties ``taken``, so that rows are freed one after the other."""
        with torch.cuda.stream(self._stream):
            if ready is not None:
                ready.wait()
            while taken:
                infos, rows_of, states = taken.pop(0)
                try:
                    chunks = chunks_of(infos, rows_of(), states)
                    if self._stream is not None:
                        self._stream.synchronize()  # from now on another stream may read them
                    self.data.put(chunks)
                except (Lost, MemoryError, RuntimeError) as error:  # of memory on a GPU, too
                    if not isinstance(error, Lost):
                        logger.warning("KVBoost keeps less of a request: %s", error)
                    self.data.refuse([info.key for info in infos])


def _layer_number(name: str) -> tuple[list[int], str]:
    """The numbers in a layer's name, ``model.layers.12.self_attn.attn``, and the name: a model that
    drafts has the same numbers."""
    return [int(digits) for digits in re.findall(r"\d+", name)], name


def _gpu_kernels(pages: Pages, rotation: Rotation) -> GpuKernels | None:
    """Our kernels, where they serve these pages."""
    if not pages.is_plain or not triton.serves(pages.device):
        return None
    from kvboost.reuse.paged.kernels import GpuKernels

    kernels = GpuKernels(pages, rotation)
    kernels.warm_up(pages.layers[0].impl.num_heads)
    kernels.take_rows([(0, 1)], [SCRATCH_PAGE])
    return kernels
