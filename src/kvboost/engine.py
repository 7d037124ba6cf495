"""KVBoost: text → ids → plan → assemble → prefill → decode → admit."""

from __future__ import annotations

import os
import sys
import threading
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch

from kvboost.cache.chunk import Lineage
from kvboost.cache.store import ChunkStore, Hit
from kvboost.cache.tiers.ram import RamTier
from kvboost.config import (
    DEFAULT_MODEL,
    EngineConfig,
    GenerationMode,
    SamplingParams,
    choose,
    parse_bytes,
    stop_strings,
)
from kvboost.errors import ConfigError, ContextLengthError, KVBoostError, PromptError
from kvboost.model.attention import Segment
from kvboost.model.kv import KVPool, RequestKV
from kvboost.model.load import LoadedModel, load, wrap
from kvboost.model.sampling import Sampler
from kvboost.results import (
    Clock,
    GenerationResult,
    ReuseReport,
    SpanKind,
    VerificationReport,
)
from kvboost.reuse.assemble import place
from kvboost.reuse.plan import exact_prefix
from kvboost.stream import Request, Run, TextStream
from kvboost.tokens.chunking import fixed
from kvboost.tokens.hashing import ChunkKey, TokenIds, as_token_ids, root_key
from kvboost.tokens.prompt import Prompt, PromptReader
from kvboost.tokens.text import Detokenizer, StopMatcher
from kvboost.verify import verify

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

FIRST_ROOM = 512  # rows set aside for an answer; a longer one makes its KV grow
SLICE_ON_CPU = 2048
SLICE_ON_GPU = 16384  # a forward costs launches first: fewer, larger ones

NOT_MOVED = "moved reuse does not exist yet: chunk_kv_reuse served exact hits only"


class SamplingOptions(TypedDict, total=False):
    """How tokens are picked; see ``SamplingParams`` for what each leaves to the model."""

    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    logprobs: int | None
    ignore_eos: bool


class KVBoost:
    """A model that does not read the same text twice. Safe to call from several threads."""

    def __init__(self, model: LoadedModel, config: EngineConfig | None = None) -> None:
        """Most callers want :meth:`from_pretrained` or :meth:`from_model`."""
        self.config = config or EngineConfig()
        self._model = model
        self._prompts = PromptReader(model.tokenizer, model.vocab_size)
        self._pool = KVPool(model.forward.shape)
        self._store = ChunkStore(
            RamTier(self.config.max_cache_bytes),
            chunk_size=self.config.chunk_size,
            max_chunks=self.config.max_chunks,
        )
        self._prefill_slice = self.config.prefill_slice or (
            SLICE_ON_CPU if model.device.type == "cpu" else SLICE_ON_GPU
        )
        self._closed = False
        self._totals: Counter[str] = Counter()
        self._totals_lock = threading.Lock()

    @classmethod
    def from_pretrained(
        cls,
        model_name: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        strict: bool = True,
        chunk_size: int = 128,
        max_chunks: int | None = None,
        max_cache_bytes: int | str = "2GiB",
        chunking: str = "fixed",
        recompute_strategy: str = "auto",
        recompute_ratio: float = 0.15,
        recompute_overlap: int = 16,
        kv_cache_bits: int = 16,
        disk_cache_dir: str | None = None,
        prefill_slice: int | None = None,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        **hf_kwargs: Any,
    ) -> Self:
        """Loads a model: a bundled name, a folder, a ``.gguf`` file or a hub id.

        ``strict`` refuses architectures whose text can never be moved; ``strict=False`` serves
        them with exact prefix reuse. ``device`` and ``dtype`` default to what the machine does
        well. ``hf_kwargs`` go to transformers' ``from_pretrained``.
        """
        config = EngineConfig(
            chunk_size=chunk_size,
            max_chunks=max_chunks,
            max_cache_bytes=parse_bytes(max_cache_bytes, "max_cache_bytes"),
            chunking=chunking,
            recompute_strategy=recompute_strategy,
            recompute_ratio=recompute_ratio,
            recompute_overlap=recompute_overlap,
            kv_cache_bits=kv_cache_bits,
            disk_cache_dir=disk_cache_dir,
            prefill_slice=prefill_slice,
        )
        return cls(load(model_name, strict=strict, device=device, dtype=dtype, **hf_kwargs), config)

    @classmethod
    def from_model(
        cls, model: Any, tokenizer: Any, *, strict: bool = True, config: EngineConfig | None = None
    ) -> Self:
        """Takes a transformers model and tokenizer that are already in memory. Until ``close`` the
        model's attention is ours, and its weights must stay as they are; switching between named
        adapters is fine."""
        return cls(wrap(model, tokenizer, strict=strict), config)

    @property
    def model_name(self) -> str:
        return self._model.name

    @property
    def device(self) -> torch.device:
        return self._model.device

    @property
    def dtype(self) -> torch.dtype:
        return self._model.forward.shape.dtype

    @property
    def context_length(self) -> int | None:
        return self._model.context_length

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids a prompt stands for."""
        ids: list[int] = self._prompts.read(prompt).tolist()
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._model.tokenizer.decode(token_ids)

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        *,
        cache_salt: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> GenerationResult:
        """Answers a prompt. What of it was read before is not read again.

        Greedy unless ``temperature``, ``top_k``, ``top_p`` or ``min_p`` is given. ``seed`` makes
        sampling repeatable; ``stop`` is a string or several; ``logprobs=k`` adds the k likeliest
        tokens of each step. Requests with different ``cache_salt`` never share KV.
        """
        stream = self.stream(prompt, max_new_tokens, mode, cache_salt=cache_salt, **sampling)
        for _ in stream:
            pass
        return stream.result

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        max_new_tokens: int = 64,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        *,
        cache_salt: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> GenerationResult:
        """Answers a conversation in the model's own chat template."""
        if isinstance(messages, str):
            raise PromptError("chat() takes messages; give text to generate()")
        return self.generate(messages, max_new_tokens, mode, cache_salt=cache_salt, **sampling)

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        *,
        cache_salt: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> TextStream:
        """Like :meth:`generate`, as an iterator of text pieces; ``.result`` follows the last one.

        Leaving early is fine: close the stream (or leave its ``with`` block) and what was read
        until then is kept.
        """
        clock = Clock()
        params = _sampling_params(max_new_tokens, sampling)
        request = self._request(self._prompts.read(prompt), mode, cache_salt, params)
        clock.lap("tokenize")
        run = Run(clock)
        return TextStream(self._serve(request, run), run, request)

    def plan(
        self,
        prompt: Prompt,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        *,
        cache_salt: str = "",
    ) -> ReuseReport:
        """How a prompt would be served now. Runs nothing, counts nothing."""
        request = self._request(self._prompts.read(prompt), mode, cache_salt)
        with self._lookup(request, len(request.token_ids) - 1, pin=False) as hits:
            return self._report(request, hits)

    def warm(
        self,
        text: Prompt,
        position_offset: int = 0,
        header: str | None = None,
        *,
        cache_salt: str = "",
    ) -> int:
        """Reads ``text``, behind ``header`` if given, and keeps it. Returns the new chunks."""
        if position_offset != 0:
            raise ConfigError(
                f"position_offset={position_offset!r}: text is read from position 0; put what "
                "stands before it into header"
            )
        if header is not None and not isinstance(text, str):
            raise PromptError("header= goes with text given as a string")
        ids = self._prompts.read(text if header is None else f"{header}{text}")
        request = self._request(ids, GenerationMode.PREFIX_CACHE, cache_salt)
        run = Run(Clock())
        with self._pool.lend(len(ids)) as kv:
            self._prefill(request, run, kv)
            return self._admit(request, run, kv)

    def score(
        self,
        prompt: Prompt,
        continuation: Sequence[int],
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        *,
        cache_salt: str = "",
    ) -> torch.Tensor:
        """Logits ``[len(continuation), vocab]`` with which the model meets each token of
        ``continuation`` behind ``prompt``. Keeps nothing."""
        follow = self._prompts.read(continuation)
        ids = as_token_ids(np.concatenate([self._prompts.read(prompt), follow[:-1]]))
        request = self._request(ids, mode, cache_salt)
        with self._pool.lend(len(request.token_ids)) as kv:
            return self._prefill(request, Run(Clock()), kv, num_logits=len(follow))

    def verify_correctness(self, max_new_tokens: int = 32) -> VerificationReport:
        """Answers built-in prompts with and without reuse and compares. The report is truthy only
        if most of the prompt tokens were reused and the answers agreed."""
        return verify(self, max_new_tokens)

    def cache_stats(self) -> dict[str, Any]:
        """What the cache holds and what it has done. ``cache_hits`` are chunks that served rows,
        wholly or in part; ``cache_misses`` are the chunks that computed rows would fill."""
        store = self._store.stats()
        with self._totals_lock:
            totals = Counter(self._totals)
        lookups = totals["hits"] + totals["misses"]
        rate = totals["hits"] / lookups if lookups else 0.0
        prompt = totals["prompt_tokens"]
        return {
            "hot_chunks": store["chunks"],
            "hot_memory_mb": store["nbytes"] / 1e6,
            "cache_hits": totals["hits"],
            "approximate_hits": 0,
            "cache_misses": totals["misses"],
            "hit_rate": rate,
            "exact_hit_rate": rate,
            "requests": totals["requests"],
            "prompt_tokens": prompt,
            "exact_tokens": totals["exact_tokens"],
            "token_reuse_rate": totals["exact_tokens"] / prompt if prompt else 0.0,
            "generated_tokens": totals["generated_tokens"],
            "admitted": store["admitted"],
            "evicted": store["evicted"],
            "rejected": store["rejected"],
            "failed": store["failed"],
            "lost": store["lost"],
            "idle_kv_bytes": self._pool.idle_bytes,
            "pinned": store["pinned"],
            "tiers": {
                "ram": {
                    "chunks": store["chunks"],
                    "bytes": store["nbytes"],
                    "max_bytes": self.config.max_cache_bytes,
                }
            },
        }

    def clear(self) -> None:
        """Forgets everything that was read."""
        self._store.clear()

    def forget_salt(self, cache_salt: str) -> None:
        """Forgets everything that was read under ``cache_salt``."""
        self._store.forget(self._root(cache_salt))

    def close(self) -> None:
        """Lets go of the cache and gives the model its own attention back."""
        self._closed = True
        self._store.close()
        self._pool.clear()
        self._model.forward.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _serve(self, request: Request, run: Run) -> Generator[str, None, None]:
        """The pipeline of one request; yields the text that is safe to show."""
        room = min(self._answer_limit(request), FIRST_ROOM)
        with self._pool.lend(len(request.token_ids) + room) as kv:
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
        return self._store.admit(self._root(request.salt), ids, kv.copy_rows, Lineage.EXACT)

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
        with self._store.lookup(self._root(request.salt), ids, pin=pin) as hits:
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
        if self.context_length is not None:
            limit = min(limit, self.context_length - len(request.token_ids))
        return limit

    def _request(
        self,
        token_ids: TokenIds,
        mode: GenerationMode | str,
        salt: str,
        params: SamplingParams | None = None,
    ) -> Request:
        if self._closed:
            raise KVBoostError("this engine is closed; make another one")
        if not isinstance(salt, str):
            raise ConfigError(f"cache_salt={salt!r} must be a string")
        if self.context_length is not None and len(token_ids) >= self.context_length:
            raise ContextLengthError(len(token_ids), self.context_length)
        return Request(
            token_ids,
            choose(GenerationMode, mode, "mode"),
            salt,
            params or SamplingParams(max_new_tokens=1),
        )

    def _root(self, salt: str) -> ChunkKey:
        identity = f"{self._model.fingerprint} {self._model.active_adapters}"
        return root_key(identity, salt, Lineage.EXACT.value)

    def _count(self, request: Request, run: Run) -> None:
        hits = sum(span.kind is SpanKind.EXACT for span in run.reuse.spans)
        computed = len(fixed(run.reuse.count(SpanKind.COMPUTE), self.config.chunk_size))
        with self._totals_lock:
            if request.mode is not GenerationMode.BASELINE:
                self._totals["hits"] += hits
                self._totals["misses"] += computed
            self._totals["requests"] += 1
            self._totals["prompt_tokens"] += run.reuse.prompt_tokens
            self._totals["exact_tokens"] += run.reuse.count(SpanKind.EXACT)
            self._totals["generated_tokens"] += len(run.token_ids)


def _sampling_params(max_new_tokens: int, options: SamplingOptions) -> SamplingParams:
    known = {option.name for option in fields(SamplingParams)}
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; there are {', '.join(sorted(known))}")
    given: dict[str, Any] = {**options, "stop": stop_strings(options.get("stop"))}
    return SamplingParams(max_new_tokens=max_new_tokens, **given)
