"""One request's way: plan → assemble → prefill → decode → admit."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from kvboost.cache.chunk import Lineage
from kvboost.cache.store import ChunkStore, Hit
from kvboost.cache.tiers.ram import RamTier
from kvboost.config import EngineConfig, GenerationMode
from kvboost.model.attention import Segment
from kvboost.model.kv import KVPool, RequestKV
from kvboost.model.load import LoadedModel
from kvboost.model.sampling import Sampler
from kvboost.results import Clock, ReuseReport, SpanKind
from kvboost.reuse.assemble import place
from kvboost.reuse.plan import exact_prefix
from kvboost.stream import Request, Run
from kvboost.tokens.chunking import fixed
from kvboost.tokens.hashing import ChunkKey, TokenIds, as_token_ids, root_key
from kvboost.tokens.text import Detokenizer, StopMatcher

FIRST_ROOM = 512  # rows set aside for an answer; a longer one makes its KV grow
SLICE_ON_CPU = 2048
SLICE_ON_GPU = 16384  # a forward costs launches first: fewer, larger ones

NOT_MOVED = "moved reuse does not exist yet: chunk_kv_reuse served exact hits only"


class Pipeline:
    """Runs checked requests against a model and a chunk store. Safe to call from several threads:
    what they share has locks of its own."""

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        self._model = model
        self._config = config
        self.pool = KVPool(model.forward.shape)
        self.store = ChunkStore(
            RamTier(config.max_cache_bytes),
            chunk_size=config.chunk_size,
            max_chunks=config.max_chunks,
        )
        self._prefill_slice = config.prefill_slice or (
            SLICE_ON_CPU if model.device.type == "cpu" else SLICE_ON_GPU
        )
        self._totals: Counter[str] = Counter()
        self._totals_lock = threading.Lock()

    def totals(self) -> Counter[str]:
        """What all requests so far add up to."""
        with self._totals_lock:
            return Counter(self._totals)

    def plan(self, request: Request) -> ReuseReport:
        """How a request would be served now."""
        with self._lookup(request, len(request.token_ids) - 1, pin=False) as hits:
            return self._report(request, hits)

    def read(self, request: Request) -> int:
        """Computes what is not known of a prompt and keeps it; returns the new chunks."""
        run = Run(Clock())
        with self.pool.lend(len(request.token_ids)) as kv:
            self._prefill(request, run, kv)
            return self._admit(request, run, kv)

    def score(self, request: Request, num_logits: int) -> torch.Tensor:
        """The logits of a prompt's last ``num_logits`` rows; keeps nothing."""
        with self.pool.lend(len(request.token_ids)) as kv:
            return self._prefill(request, Run(Clock()), kv, num_logits)

    def serve(self, request: Request, run: Run) -> Generator[str, None, None]:
        """The pipeline of one request; yields the text that is safe to show."""
        room = min(self._answer_limit(request), FIRST_ROOM)
        with self.pool.lend(len(request.token_ids) + room) as kv:
            settled = True
            try:
                logits = self._prefill(request, run, kv)
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
                    self._count(request, run)
                    run.clock.lap("admit")

    def _prefill(
        self, request: Request, run: Run, kv: RequestKV, num_logits: int = 1
    ) -> torch.Tensor:
        """Plans the prompt, puts known rows in place and computes the rest, a slice at a time.
        Returns the logits of the last ``num_logits`` rows, which are always computed."""
        ids = request.token_ids
        first_logit = len(ids) - num_logits
        with self._lookup(request, first_logit) as hits:
            run.reuse = self._report(request, hits)
            run.clock.lap("plan")
            place(run.reuse.spans, hits, kv)
            run.clock.lap("assemble")
        run.rows = run.reuse.cached_tokens
        logits = []
        for start, end in self._slices(request, run.rows):
            wanted = max(0, end - max(start, first_logit))
            logits.append(self._compute(kv, ids[start:end], start, wanted))
            run.rows = end
        return logits[-1] if len(logits) == 1 else torch.cat(logits)

    def _decode(
        self, request: Request, run: Run, kv: RequestKV, logits: torch.Tensor
    ) -> Iterator[str]:
        """Token after token until the model, a stop string or the limit ends it."""
        params = request.params
        sample = Sampler(params, self._model.generation_config, request.token_ids, logits.device)
        detokenizer = Detokenizer(self._model.tokenizer)
        stops = StopMatcher(params.stop)
        ends = frozenset[int]() if params.ignore_eos else self._model.eos_ids
        limit = self._answer_limit(request)
        while True:
            token, logprob = sample(logits)
            if not run.token_ids:
                run.clock.first_token()
                run.clock.lap("prefill")
            else:
                run.clock.lap("decode")
            run.accept(token, logprob)
            yield from run.show(stops.push(detokenizer.push(token)))
            if token in ends or stops.stopped:
                run.finish_reason = "stop"
                break
            if len(run.token_ids) == limit:
                run.finish_reason = "length"
                break
            logits = self._step(request, run, kv)
        yield from run.show(stops.push(detokenizer.finish()))
        yield from run.show(stops.finish())
        if stops.stopped:
            run.finish_reason = "stop"

    def _step(self, request: Request, run: Run, kv: RequestKV) -> torch.Tensor:
        """Feeds the last token; logits of the next."""
        start = run.rows
        run.rows += 1
        if self._model.support.switches_at(start):
            # From here on every position rotates by other factors: all is computed anew, and what
            # it gives fits no shorter prompt.
            run.kept = False
            ids = as_token_ids(np.concatenate([request.token_ids, run.token_ids]))
            return self._compute(kv, ids, 0, 1)[-1]
        return self._compute(kv, as_token_ids(run.token_ids[-1:]), start, 1)[-1]

    def _admit(self, request: Request, run: Run, kv: RequestKV) -> int:
        """Keeps the rows this request computed, generated tokens included; returns how many
        chunks are new."""
        if request.mode is GenerationMode.BASELINE or not run.kept:
            return 0
        num_rows = min(run.rows, self._reusable(request))
        ids = as_token_ids(np.concatenate([request.token_ids, run.token_ids])[:num_rows])
        return self.store.admit(self.root(request.salt), ids, kv.copy_rows, Lineage.EXACT)

    def _compute(
        self, kv: RequestKV, token_ids: TokenIds, start: int, num_logits: int
    ) -> torch.Tensor:
        """Runs ``token_ids`` at positions from ``start`` on."""
        positions = range(start, start + len(token_ids))
        kv.reserve(positions.stop)
        ids = torch.from_numpy(token_ids.astype(np.int64))
        return self._model.forward([Segment(kv, ids, positions, num_logits)])

    def _slices(self, request: Request, start: int) -> Iterator[tuple[int, int]]:
        """What is to be computed, in pieces that bound the memory of one forward. They end on a
        fixed grid, so that a hit leaves the later ones as they were. Where rotation depends on
        the prompt's length, the model must see it whole."""
        total = len(request.token_ids)
        step = self._prefill_slice if self._reusable(request) else total
        while start < total:
            end = min((start // step + 1) * step, total)
            yield start, end
            start = end

    @contextmanager
    def _lookup(self, request: Request, limit: int, *, pin: bool = True) -> Iterator[list[Hit]]:
        """Known chunks that serve the first ``limit`` rows of a prompt, pinned meanwhile."""
        if request.mode is GenerationMode.BASELINE:
            yield []
            return
        ids = request.token_ids[: min(limit, self._reusable(request))]
        with self.store.lookup(self.root(request.salt), ids, pin=pin) as hits:
            yield hits

    def _report(self, request: Request, hits: Sequence[Hit]) -> ReuseReport:
        notes = []
        if request.mode is GenerationMode.CHUNK_KV_REUSE:
            notes.append(NOT_MOVED)
        if not self._reusable(request):
            notes.append(
                f"beyond {self._model.support.reuse_limit:,} tokens this model's rotation depends "
                "on the prompt's length: nothing is reused or kept"
            )
        return ReuseReport(exact_prefix(len(request.token_ids), hits), tuple(notes))

    def _reusable(self, request: Request) -> int:
        """How many leading rows may be reused or kept."""
        limit = self._model.support.reuse_limit
        if limit is None:
            return sys.maxsize
        return limit if len(request.token_ids) < limit else 0

    def _answer_limit(self, request: Request) -> int:
        """How many tokens may be generated: what was asked, or what the context still holds."""
        limit = request.params.max_new_tokens
        if self._model.context_length is not None:
            limit = min(limit, self._model.context_length - len(request.token_ids))
        return limit

    def root(self, salt: str) -> ChunkKey:
        """Where the prefix tree of this model, its adapters and ``salt`` begins."""
        identity = f"{self._model.fingerprint} {self._model.active_adapters}"
        return root_key(identity, salt, Lineage.EXACT.value)

    def _count(self, request: Request, run: Run) -> None:
        hits = sum(span.kind is SpanKind.EXACT for span in run.reuse.spans)
        computed = len(fixed(run.reuse.count(SpanKind.COMPUTE), self._config.chunk_size))
        with self._totals_lock:
            if request.mode is not GenerationMode.BASELINE:
                self._totals["hits"] += hits
                self._totals["misses"] += computed
            self._totals["requests"] += 1
            self._totals["prompt_tokens"] += run.reuse.prompt_tokens
            self._totals["exact_tokens"] += run.reuse.count(SpanKind.EXACT)
            self._totals["generated_tokens"] += len(run.token_ids)
