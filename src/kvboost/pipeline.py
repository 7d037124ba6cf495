"""One request's way: plan → assemble → repair and prefill → decode → admit.

The way is a generator: it gives the rows that must go through the model next and is sent their
logits. Run by itself, every segment is a forward of its own; in a batch, those of many requests are
packed into one (``serve/loop.py``).
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch

from kvboost.cache.anchors import anchor_window
from kvboost.cache.chunk import Lineage, Origin
from kvboost.cache.compress import KVData, Packer
from kvboost.cache.foresight import Foresight
from kvboost.cache.store import ChunkLost, ChunkStore
from kvboost.cache.tiers.opened import open_tiers
from kvboost.config import EngineConfig, GenerationMode
from kvboost.memory import Trimmer
from kvboost.model.attention import Segment
from kvboost.model.kv import KVPool, RequestKV
from kvboost.model.load import LoadedModel
from kvboost.model.native.relocate import move_keys
from kvboost.model.sampling import Sampler
from kvboost.planner import Planner, repair_name
from kvboost.results import Clock, ReuseReport, SpanKind
from kvboost.reuse.assemble import place
from kvboost.reuse.cost import CostModel
from kvboost.reuse.plan import Plan
from kvboost.reuse.repair import STRATEGIES, Hook, Moved
from kvboost.reuse.rope import Rotation
from kvboost.reuse.shift import Shift
from kvboost.sharing import Live
from kvboost.stream import Request, Run
from kvboost.tokens.chunking import Cutter
from kvboost.tokens.hashing import ChunkKey, TokenIds, as_token_ids, root_key
from kvboost.tokens.text import Detokenizer, StopMatcher
from kvboost.totals import Totals

FIRST_ROOM = 512  # rows set aside for an answer; a longer one makes its KV grow
SLICE_ON_CPU = 2048
SLICE_ON_GPU = 16384  # a forward costs launches first: fewer, larger ones
AUDITED_TOKENS = 8
"""The first tokens of an answer are audited: later ones build on them."""
BREATH_SECONDS = 0.02
"""So long one request of a batch may put rows in place before the others have their turn."""

Result = TypeVar("Result")
Steps = Generator[Segment | None, torch.Tensor | None, None]
"""A request on its way: gives the rows it needs next and is sent their logits. ``None`` is a
breath: it needs nothing, but text may be shown and others may go first."""


class Pipeline:
    """Runs checked requests against a model and a chunk store. Safe to call from several threads:
    what they share has locks of its own."""

    def __init__(self, model: LoadedModel, config: EngineConfig, costs: Path | None = None) -> None:
        self._model = model
        self._config = config
        self.pool = KVPool(model.forward.shape, max_idle=8)
        cut = Cutter(
            config.chunking,
            config.chunk_size,
            model.tokenizer.decode,
            model.vocab_size,
            config.document_markers,
        )
        tiers = open_tiers(config, model.device)
        self.store = ChunkStore(
            tiers,
            cut=cut,
            origin=Origin(model.fingerprint, model.name),
            window=anchor_window(config.chunk_size),
            max_chunks=config.max_chunks,
            policy=partial(Foresight, use_importance=config.key_norms),
            attention_share=model.attention_share,
        )
        self.cost = CostModel(model.attention_share, costs)
        self._rotation: Rotation | None = None
        if model.frequencies is not None:
            interleaved = model.support.architecture.interleaved
            self._rotation = Rotation(model.frequencies, interleaved=interleaved, kernel=move_keys)
        moves = self._rotation is not None
        self._planner = Planner(self.store, self.cost, model.support, self.root, moves=moves)
        self._packer = Packer(
            config.kv_cache_bits,
            self._rotation,
            own=tiers.ram.own if model.device.type == "cpu" else None,
            measures_keys=config.key_norms,
        )
        self._prefill_slice = config.prefill_slice or (
            SLICE_ON_CPU if model.device.type == "cpu" else SLICE_ON_GPU
        )
        self._trimmer = Trimmer()
        self.live = Live(shares=model.support.reuse_limit is None)
        self._totals = Totals(config.chunk_size)

    def stats(self) -> dict[str, Any]:
        """What the cache holds, and what all requests so far add up to."""
        store = self.store.stats()
        memory = store["tiers"]["ram"]
        return {
            "hot_chunks": memory["chunks"],
            "hot_memory_mb": memory["bytes"] / 1e6,
            **self._totals.stats(),
            "idle_kv_bytes": self.pool.idle_bytes,
            **store,
        }

    def plan(self, request: Request) -> ReuseReport:
        """How a request would be served now."""
        live_end = len(request.token_ids)
        with self._planner.lookup(request, live_end, pin=False) as known:
            plan, notes = self._planner.plan(request, known)
        return ReuseReport(plan.spans, notes, request.repair.strategy if plan.moved else None)

    def estimate_ms(self, num_tokens: int) -> float | None:
        """How long a full prefill would take; None before forwards were measured."""
        if not self.cost.is_measured:
            return None
        return self.cost.forward(num_tokens, num_tokens // 2) * 1e3

    def known_exactly(self, token_ids: TokenIds, salt: str) -> int:
        """How many of the first tokens an exact hit would cover."""
        with self.store.lookup(self.root(salt), token_ids, pin=False) as known:
            return known.exact[-1].end if known.exact else 0

    def read(self, request: Request) -> int:
        """Computes what is not known of a prompt and keeps it; returns the new chunks."""
        run = Run(Clock())
        with self.pool.lend(len(request.token_ids)) as kv:
            self._run(self._prefill(request, run, kv))
            return self._admit(request, run, kv)

    def score(self, request: Request, run: Run, num_logits: int) -> torch.Tensor:
        """The logits of a prompt's last ``num_logits`` rows; keeps nothing."""
        with self.pool.lend(len(request.token_ids)) as kv:
            logits = self._run(self._prefill(request, run, kv, num_logits))
            if logits.device.type == "cuda":
                torch.cuda.synchronize(logits.device)
            run.clock.lap("prefill")
            return logits

    def pieces(self, steps: Steps, run: Run) -> Generator[str, None, None]:
        """Runs a request by itself; yields the text that is safe to show."""
        shown = 0
        with closing(steps):
            logits = None
            while True:
                try:
                    segment = steps.send(logits)
                except StopIteration:
                    break
                new, shown = run.text[shown:], len(run.text)
                yield from new
                logits = None if segment is None else self._forward(steps, segment)
        yield from run.text[shown:]

    def steps(self, request: Request, run: Run) -> Steps:
        """The way of one request. What it has to show is in ``run``."""
        root = self.root(request.salt)
        with (
            self.pool.lend(
                self.rows_for(request, run),
                self.live.base_for(request, root) if run.batched else None,
            ) as kv,
            self.live.running(request, root, run, kv),
        ):
            settled = True
            try:
                logits = yield from self._prefill(request, run, kv)
                yield from self._decode(request, run, kv, logits[-1])
            except GeneratorExit:
                # Closed, or else collected in a thread that may hold any lock of ours.
                settled = run.closing
                raise
            except BaseException:
                run.finish_reason, run.kept = "error", False
                raise
            finally:
                if settled:
                    run.clock.lap("decode")
                    self._admit(request, run, kv)
                    self._totals.add(request, run)
                    self._trimmer.after_request()
                    run.clock.lap("admit")

    def rows_for(self, request: Request, run: Run) -> int:
        """The rows that are set aside for a request. In a batch, where they must be counted before
        it begins, all it may ever need."""
        answer = self._answer_limit(request)
        room = answer if run.batched else min(answer, FIRST_ROOM)
        return len(request.token_ids) + room

    def _run(self, steps: Generator[Segment | None, torch.Tensor | None, Result]) -> Result:
        """Runs ``steps`` by themselves to their end."""
        logits = None
        while True:
            try:
                segment = steps.send(logits)
            except StopIteration as end:
                return cast(Result, end.value)
            logits = None if segment is None else self._forward(steps, segment)

    def _forward(
        self, steps: Generator[Segment | None, torch.Tensor | None, Any], segment: Segment
    ) -> torch.Tensor:
        """The logits of a segment; a failure is the steps' to know."""
        try:
            return self._model.forward([segment])
        except BaseException as error:
            steps.throw(error)
            raise

    def _prefill(
        self, request: Request, run: Run, kv: RequestKV, num_logits: int = 1
    ) -> Generator[Segment | None, torch.Tensor | None, torch.Tensor]:
        """Plans the prompt, puts known rows in place and computes the rest, a slice at a time.
        Returns the logits of the last ``num_logits`` rows, which are always computed; what they
        answer is the prompt up to the first of them."""
        live_end = len(request.token_ids) - num_logits + 1
        run.epoch = self.store.epoch
        plan = yield from self._assemble(request, run, kv, live_end)
        while plan is None:  # something was lost on the way: it is planned without it
            plan = yield from self._assemble(request, run, kv, live_end, again=True)
        run.exact_rows = plan.exact_rows
        if plan.moved:
            return (yield from self._repair(request, run, kv, plan, live_end, num_logits))
        run.rows = run.reuse.cached_tokens
        ids = request.token_ids
        logits = []
        while (start := run.rows) < len(ids):
            end = self._slice_end(request, run, start)
            wanted = max(0, end - max(start, live_end - 1))
            rows = range(start, end)
            logits.append((yield from self._compute(request, kv, ids[start:end], rows, wanted)))
            run.rows = end
        return logits[-1] if len(logits) == 1 else torch.cat(logits)

    def _assemble(
        self, request: Request, run: Run, kv: RequestKV, live_end: int, *, again: bool = False
    ) -> Generator[None, object, Plan | None]:
        """Plans the prompt and puts what is known in place; None if a chunk of the plan turned
        out to be lost. What that is never comes ``again``: a remote store is not asked twice."""
        with self._planner.lookup(request, live_end, ask_remote=not again) as known:
            plan, notes = self._planner.plan(request, known, kv.own_start)
            behind = (hit for hit in plan.in_place if hit.chunk.lineage is Lineage.APPROXIMATE)
            self.store.touch([*known.exact, *behind], *(moved.hits for moved in plan.moved))
            run.clock.lap("plan")
            seconds = breath = 0.0
            if plan.moved and kv.base is not None:
                kv.leave_base()  # repair changes rows that others would read
            try:
                for hit, data in self.store.fetch(plan.hits):
                    spent = run.clock.lap("fetch")
                    place(hit, data, kv, self._packer)
                    spent += run.clock.lap("assemble")
                    seconds += spent
                    breath += spent
                    if run.batched and breath > BREATH_SECONDS:
                        breath = 0.0
                        yield None
                        run.clock.lap("queue")
            except ChunkLost:
                return None
        run.reuse = ReuseReport(plan.spans, notes)
        if plan.moved:
            self.cost.observe_place(plan.num_known, seconds)
        return plan

    def _repair(
        self,
        request: Request,
        run: Run,
        kv: RequestKV,
        plan: Plan,
        live_end: int,
        num_logits: int,
    ) -> Generator[Segment, torch.Tensor | None, torch.Tensor]:
        """Computes what is new of a prompt with moved runs, and what a strategy names of those,
        together; as :meth:`_prefill`."""
        ids = torch.from_numpy(request.token_ids.astype(np.int64)).to(self._model.device)
        total = len(ids)
        kv.reserve(total)

        def look(
            positions: torch.Tensor, hook: Hook, until: int, absent: torch.Tensor | None
        ) -> None:
            segment = Segment(
                kv, ids[positions], positions, 0, hook=hook, until=until, absent=absent
            )
            self._model.forward([segment])

        for unknown in plan.computed():  # a look passes over them, but not over what is no number
            kv.rows(unknown.start, unknown.stop).zero_()
        moved = Moved(plan, live_end, kv.shape.num_layers, self._model.device, look)
        choice = STRATEGIES[request.repair.strategy](moved, request.repair)
        run.clock.lap("probe")
        rows = (choice.rows | moved.unknown).nonzero()[:, 0]
        spans = moved.spans()
        logits, since = [], 0
        # What a slice shifts depends on where it ends, so that may not depend on who else runs.
        for some in torch.split(rows, self._prefill_slice):
            hook = None
            if choice.shift and self._rotation is not None:
                # A slice shifts the rows from the end of the one before to its own: each once.
                until = int(some[-1]) + 1
                shift, since = Shift(self._rotation, some, spans.between(since, until)), until
                hook = shift if shift.useful else None
            wanted = int((some >= total - num_logits).sum())
            given = yield Segment(kv, ids[some], some, wanted, hook=hook)
            assert given is not None
            logits.append(given)
        run.rows = total
        recomputed = choice.rows.nonzero()[:, 0].tolist()
        run.reuse = replace(
            run.reuse,
            strategy=request.repair.strategy,
            recomputed=tuple(recomputed),
            charged_tokens=moved.charged_tokens + len(recomputed),
        )
        run.clock.lap("repair")
        return logits[-1] if len(logits) == 1 else torch.cat(logits)

    def _decode(self, request: Request, run: Run, kv: RequestKV, logits: torch.Tensor) -> Steps:
        """Token after token until the model, a stop string or the limit ends it."""
        params = request.params
        sample = Sampler(params, self._model.generation_config, request.token_ids, logits.device)
        detokenizer = Detokenizer(self._model.tokenizer)
        stops = StopMatcher(params.stop)
        ends = frozenset[int]() if params.ignore_eos else self._model.eos_ids
        limit = self._answer_limit(request)
        while True:
            if run.record and run.reuse.strategy is not None and len(run.recorded) < AUDITED_TOKENS:
                run.recorded.append(logits.clone())
            token, logprob = sample(logits)
            if not run.token_ids:
                run.clock.first_token()
                self._learn(request, run, run.clock.lap("prefill"))
            else:
                seconds = run.clock.lap("decode")
                if len(run.token_ids) == 1 and not run.accompanied:
                    # One step of a request says what all of them cost.
                    self.cost.observe(1, run.rows, seconds)
            run.accept(token, logprob)
            run.show(stops.push(detokenizer.push(token)))
            if token in ends or stops.stopped:
                run.finish_reason = "stop"
                break
            if len(run.token_ids) == limit:
                run.finish_reason = "length"
                break
            if run.batched and len(run.token_ids) == 1:  # others may be waiting for this prompt
                yield None
                self._admit(request, run, kv, wait=False)
                run.clock.lap("admit")
            logits = yield from self._step(request, run, kv)
        run.show(stops.push(detokenizer.finish()))
        run.show(stops.finish())
        if stops.stopped:
            run.finish_reason = "stop"
        yield None  # the text is shown before the rows are kept

    def _step(
        self, request: Request, run: Run, kv: RequestKV
    ) -> Generator[Segment, torch.Tensor | None, torch.Tensor]:
        """Feeds the last token; logits of the next."""
        start = run.rows
        if self._model.support.switches_at(start):
            # From here on every position rotates by other factors: all is computed anew, and what
            # it gives fits no shorter prompt.
            run.kept = False
            ids = as_token_ids(np.concatenate([request.token_ids, run.token_ids]))
            logits = yield from self._compute(request, kv, ids, range(len(ids)), 1)
        else:
            last = as_token_ids(run.token_ids[-1:])
            rows = range(start, start + 1)
            logits = yield from self._compute(request, kv, last, rows, 1)
        run.rows += 1  # only now: whoever leaves before keeps nothing that was not computed
        return logits[-1]

    def _learn(self, request: Request, run: Run, seconds: float) -> None:
        """Takes a prefill without repair or company as an example of what a forward costs; one
        that makes stock transformers' calls says little of what the others do."""
        if self._as_stock(request) and self._model.forward.has_kernels:
            return
        if not run.accompanied and not run.reuse.count(SpanKind.MOVED):
            known, total = run.reuse.cached_tokens, run.reuse.prompt_tokens
            self.cost.observe(total - known, (known + total) // 2, seconds)

    def _admit(self, request: Request, run: Run, kv: RequestKV, *, wait: bool = True) -> int:
        """Keeps the rows this request computed, generated tokens included; returns how many
        chunks are new. Without ``wait``, nothing if the store is busy."""
        if request.mode is GenerationMode.BASELINE or not (run.kept and request.keep):
            return 0
        num_rows = min(run.rows, self._planner.reusable(request))
        ids = as_token_ids(np.concatenate([request.token_ids, run.token_ids])[:num_rows])

        def pack(start: int, end: int, like: KVData | None, common: int) -> KVData:
            return self._packer.pack(kv.rows(start, end), start, like, common)

        new = self.store.admit(
            self.root(request.salt),
            ids,
            pack,
            exact_rows=run.exact_rows,
            repair=repair_name(request.repair),
            boundaries=request.boundaries,
            epoch=run.epoch,
            wait=wait,
        )
        run.new_chunks += new
        return new

    def _compute(
        self,
        request: Request,
        kv: RequestKV,
        token_ids: TokenIds,
        positions: range,
        num_logits: int,
    ) -> Generator[Segment, torch.Tensor | None, torch.Tensor]:
        """Runs ``token_ids`` at ``positions``."""
        kv.reserve(positions.stop)
        ids = torch.from_numpy(token_ids.astype(np.int64))
        as_stock = self._as_stock(request)
        logits = yield Segment(kv, ids, positions, num_logits, as_stock=as_stock)
        assert logits is not None
        return logits

    def _as_stock(self, request: Request) -> bool:
        """Whether a prompt by itself makes stock transformers' calls: where nothing is reused, and
        where it goes in one piece however long it is, which would take lasting room."""
        return request.mode is GenerationMode.BASELINE or not self._planner.reusable(request)

    def _slice_end(self, request: Request, run: Run, start: int) -> int:
        """Where the slice that begins at ``start`` ends. Slices bound the memory of one forward,
        and in a batch its time. They end on a fixed grid, so that a hit leaves the later ones as
        they were. Where rotation depends on the prompt's length, the model must see it whole."""
        total = len(request.token_ids)
        step = (run.slice_rows or self._prefill_slice) if self._planner.reusable(request) else total
        return min((start // step + 1) * step, total)

    def _answer_limit(self, request: Request) -> int:
        """How many tokens may be generated: what was asked, or what the context still holds."""
        limit = request.params.max_new_tokens
        if self._model.context_length is not None:
            limit = min(limit, self._model.context_length - len(request.token_ids))
        return limit

    def root(self, salt: str) -> ChunkKey:
        """Where the prefix tree of this model, its adapters, the precision of what is kept and
        ``salt`` begins."""
        bits = self._config.kv_cache_bits
        identity = f"{self._model.fingerprint} {self._model.active_adapters} {bits}"
        return root_key(identity, salt)
