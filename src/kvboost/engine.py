"""KVBoost, the public face: checks what is asked and hands it to the pipeline."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np
import torch

from kvboost.checks.audit import Auditor
from kvboost.checks.calibrate import calibrate
from kvboost.checks.verify import verify
from kvboost.config import (
    DEFAULT_MODEL,
    EngineConfig,
    GenerationMode,
    SamplingParams,
    at_least,
    home,
    parse_bytes,
    whole,
    within,
)
from kvboost.errors import ConfigError, ContextLengthError, KVBoostError, PromptError
from kvboost.model.load import LoadedModel, load, machine_key, wrap
from kvboost.progress import Progress
from kvboost.results import (
    Arrangement,
    Calibration,
    Clock,
    GenerationResult,
    ReuseReport,
    Score,
    VerificationReport,
)
from kvboost.reuse.arrange import arrange
from kvboost.runtime.generation import Generation, text_pieces
from kvboost.runtime.loop import Loop
from kvboost.runtime.options import (
    BatchOptions,
    RequestOptions,
    ReuseOptions,
    make_request,
    refuse_unknown,
    split,
)
from kvboost.runtime.request import Request, RequestState
from kvboost.runtime.runtime import Runtime
from kvboost.runtime.streams import AsyncTextStream, TextStream
from kvboost.tokens.hashing import TokenIds, as_token_ids
from kvboost.tokens.prompt import Prompt, PromptReader

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


PREVIEW_TOKENS = 48


class KVBoost:
    """A model that does not read the same text twice. Safe to call from several threads."""

    def __init__(
        self, model: LoadedModel, config: EngineConfig | None = None, costs: Path | None = None
    ) -> None:
        """Most callers want :meth:`from_pretrained` or :meth:`from_model`. ``costs`` is a file
        for what forwards were found to cost."""
        self.config = config or EngineConfig()
        self._model = model
        self._prompts = PromptReader(model.tokenizer, model.vocab_size)
        self._runtime = Runtime(model, self.config, costs)
        self._auditor = Auditor(self, self.config.audit_fraction)
        self._loop = Loop(self._runtime, model.forward, self.config, self._auditor.watch)
        self._closed = False
        self._pid = os.getpid()

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
        key_norms: bool = False,
        gpu_cache_bytes: int | str | None = None,
        disk_cache_dir: str | os.PathLike[str] | None = None,
        disk_cache_bytes: int | str = "20GiB",
        remote_cache_url: str | None = None,
        remote_cache_bytes: int | str | None = None,
        prefill_slice: int | None = None,
        document_markers: str | Sequence[str] = "\n\n",
        reuse_moved: str = "when_faster",
        audit_fraction: float = 0.0,
        max_running: int = 16,
        max_waiting: int = 256,
        max_kv_bytes: int | str | None = None,
        sharing_wait: float = 2.0,
        step_rows: int | None = None,
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
            key_norms=key_norms,
            gpu_cache_bytes=_optional_bytes(gpu_cache_bytes, "gpu_cache_bytes"),
            disk_cache_dir=disk_cache_dir,
            disk_cache_bytes=parse_bytes(disk_cache_bytes, "disk_cache_bytes"),
            remote_cache_url=remote_cache_url,
            remote_cache_bytes=_optional_bytes(remote_cache_bytes, "remote_cache_bytes"),
            prefill_slice=prefill_slice,
            document_markers=(
                (document_markers,)
                if isinstance(document_markers, str)
                else tuple(document_markers)
            ),
            reuse_moved=reuse_moved,
            audit_fraction=audit_fraction,
            max_running=max_running,
            max_waiting=max_waiting,
            max_kv_bytes=_optional_bytes(max_kv_bytes, "max_kv_bytes"),
            sharing_wait=sharing_wait,
            step_rows=step_rows,
        )
        model = load(model_name, strict=strict, device=device, dtype=dtype, **hf_kwargs)
        return cls(model, config, home() / "costs" / f"{machine_key(model)}.json")

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

    @property
    def vocab_size(self) -> int:
        """Token ids are smaller than this."""
        return self._model.vocab_size

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
        **options: Unpack[RequestOptions],
    ) -> GenerationResult:
        """Answers a prompt. What of it was read before is not read again.

        Greedy unless ``temperature``, ``top_k``, ``top_p`` or ``min_p`` is given. ``seed`` makes
        sampling repeatable; ``stop`` is a string or several; ``logprobs=k`` adds the k likeliest
        tokens of each step. Requests with different ``cache_salt`` never share KV.
        ``recompute_strategy`` and ``recompute_ratio`` say how moved text is repaired;
        ``keep=False`` leaves nothing of this request in the cache; ``boundaries`` says where its
        documents begin.
        """
        stream = self.stream(prompt, max_new_tokens, mode, **options)
        for _ in stream:
            pass
        return stream.result

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        max_new_tokens: int = 64,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult:
        """Answers a conversation in the model's own chat template."""
        if isinstance(messages, str):
            raise PromptError("chat() takes messages; give text to generate()")
        return self.generate(messages, max_new_tokens, mode, **options)

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        **options: Unpack[RequestOptions],
    ) -> TextStream:
        """Like :meth:`generate`, as an iterator of text pieces; ``.result`` follows the last one.

        Leaving early is fine: close the stream (or leave its ``with`` block) and what was read
        until then is kept.
        """
        state = self._begin(prompt, max_new_tokens, mode, options)
        steps = self._auditor.watch(state, Generation(self._runtime, state).steps())
        return TextStream(text_pieces(self._model.forward, steps, state), state)

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 64,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        *,
        each: Sequence[BatchOptions] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[GenerationResult]:
        """Answers several prompts at once, each as :meth:`generate` would, in less time: every
        step computes the next tokens of all that are running, and what prompts share is read
        once. ``each`` has options for one prompt each, ``max_new_tokens`` and ``mode`` among
        them, which go before those for all. The first failure is raised once all have ended."""
        if isinstance(prompts, str):
            raise PromptError("generate_batch() takes several prompts; give one to generate()")
        if each is not None and len(each) != len(prompts):
            raise ConfigError(f"each has {len(each)} entries for {len(prompts)} prompts")
        started = []
        for prompt, own in zip(prompts, each or [{}] * len(prompts), strict=True):
            merged: Any = {"max_new_tokens": max_new_tokens, "mode": mode, **options, **own}
            tokens, how = merged.pop("max_new_tokens"), merged.pop("mode")
            started.append(self._begin(prompt, tokens, how, merged))
        return self._loop.answer_all(started)

    def astream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> AsyncTextStream:
        """Like :meth:`stream`, for a coroutine, beside any number of others. The request is queued
        at once; ``QueueFullError`` says when to come again. After ``timeout`` seconds it ends with
        ``finish_reason="timeout"``."""
        if timeout is not None:
            at_least(timeout, 0.0, "timeout")
        return self._submit(self._begin(prompt, max_new_tokens, mode, options), timeout)

    async def awarm(self, text: Prompt, header: str | None = None, *, cache_salt: str = "") -> int:
        """Like :meth:`warm` of one text, beside requests that are running."""
        clock = Clock()
        ids, boundaries = self._read_one(text, header)
        mode = GenerationMode.PREFIX_CACHE
        request = self._request(ids, mode, boundaries=boundaries, cache_salt=cache_salt)
        clock.lap("tokenize")
        async with self._submit(RequestState(request, clock), None) as stream:
            async for _ in stream:
                pass
        return stream.new_chunks

    async def adrain(self, timeout: float | None = None) -> bool:
        """Takes no new requests any more and waits for those that run or wait; False if they took
        longer than ``timeout`` seconds."""
        return await asyncio.to_thread(self._loop.drain, timeout)

    def serving_stats(self) -> dict[str, Any]:
        """How the requests of batches, coroutines and the server are doing."""
        return self._loop.stats()

    def estimate_ms(self, num_tokens: int) -> float | None:
        """How long reading so many tokens would take without any reuse; None as long as nothing
        has been measured."""
        return self._runtime.estimate_ms(num_tokens)

    def chunks(self, limit: int = 20) -> list[dict[str, Any]]:
        """The chunks in memory that are worth most, the last to be evicted first."""
        whole(limit, 1, "limit")
        found = self._runtime.store.most_valuable(limit)
        for chunk in found:
            chunk["text"] = self.decode(chunk.pop("token_ids")[:PREVIEW_TOKENS])
        return found

    def plan(
        self,
        prompt: Prompt,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        **options: Unpack[ReuseOptions],
    ) -> ReuseReport:
        """How a prompt would be served now. Runs nothing, counts nothing. Which moved rows would
        be recomputed is decided by the model, so none are named here."""
        refuse_unknown(options, set(ReuseOptions.__annotations__))
        return self._runtime.plan(self._request(self._prompts.read(prompt), mode, **options))

    def warm(
        self,
        text: Prompt | Sequence[str],
        position_offset: int = 0,
        header: str | None = None,
        *,
        cache_salt: str = "",
    ) -> int:
        """Reads a document, or several, and keeps it; returns the new chunks.

        A text is read behind ``header``, or without one as the beginning of a user's first
        message in the model's chat template (``header=""`` reads it alone). It then serves
        wherever it stands in a prompt, exactly where everything before it is the same too. Token
        ids and messages are read as they are.
        """
        if position_offset != 0:
            raise ConfigError(
                f"position_offset={position_offset!r} is not needed: what is read serves at any "
                "position; to read it behind something, give that as header"
            )
        if not _is_documents(text):
            ids, boundaries = self._read_one(cast(Prompt, text), header)
            return self._warm(ids, cache_salt, boundaries)
        with Progress("reading documents") as progress, progress.step("read", len(text)) as step:
            new = 0
            for document in text:
                ids, boundaries = self._read_one(document, header)
                new += self._warm(ids, cache_salt, boundaries)
                step.advance()
            return new

    def arrange(
        self,
        header: str | None,
        documents: Sequence[str],
        question: str,
        *,
        cache_salt: str = "",
    ) -> Arrangement:
        """The prompt of ``documents``, in whatever order, whose exact hit is longest, and what it
        is expected to save. ``header`` and ``question`` stand before and behind them; with
        ``header=None`` both are put into the model's chat template."""
        if isinstance(documents, str) or not documents:
            raise PromptError(f"documents={documents!r} must be several strings")
        before, behind = self._prompts.frame(header, question)
        return arrange(
            before,
            [self._prompts.join(text) for text in documents],
            behind,
            lambda ids: self._runtime.known_exactly(ids, cache_salt),
        )

    def score(
        self,
        prompt: Prompt,
        continuation: Sequence[int],
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        **options: Unpack[ReuseOptions],
    ) -> Score:
        """Logits ``[len(continuation), vocab]`` with which the model meets each token of
        ``continuation`` behind ``prompt``. Keeps nothing."""
        clock = Clock()
        refuse_unknown(options, set(ReuseOptions.__annotations__))
        if isinstance(continuation, str):
            raise PromptError("continuation is token ids, such as a result's token_ids")
        follow = self._prompts.read(continuation)
        ids = as_token_ids(np.concatenate([self._prompts.read(prompt), follow[:-1]]))
        request = self._request(ids, mode, **options)
        clock.lap("tokenize")
        state = RequestState(request, clock)
        logits = Generation(self._runtime, state, len(follow)).score()
        return Score(logits, clock.timings(), state.reuse)

    def calibrate(
        self, samples: Sequence[Prompt], max_kl: float, *, cache_salt: str = ""
    ) -> Calibration:
        """Finds the smallest share of moved rows to recompute with which the answers to
        ``samples`` stay within ``max_kl`` of a full prefill, and uses it from now on. What the
        samples reuse must have been read before, as in the traffic they stand for."""
        if self.config.recompute_strategy in ("selective", "none"):
            raise ConfigError(
                f"recompute_strategy={self.config.recompute_strategy!r} has no ratio to calibrate; "
                "use 'auto', 'query' or 'cacheblend'"
            )
        found = calibrate(self, samples, max_kl, cache_salt)
        self.config = replace(self.config, recompute_ratio=found.ratio)
        return found

    def audit(self) -> None:
        """Compares the answers that wait for it (``audit_fraction``) with a full prefill now."""
        self._auditor.drain()

    def verify_correctness(self, max_new_tokens: int = 32) -> VerificationReport:
        """Answers built-in prompts with and without reuse and compares. The report is truthy only
        if most of the prompt tokens were reused and the answers agreed."""
        return verify(self, max_new_tokens)

    def cache_stats(self) -> dict[str, Any]:
        """What the cache holds and what it has done. ``cache_hits`` are chunks that served rows,
        wholly or in part; ``cache_misses`` are the chunks that computed rows would fill."""
        return {**self._runtime.stats(), "audit": self._auditor.stats()}

    def pin(self, text: Prompt, header: str | None = None, *, cache_salt: str = "") -> int:
        """Reads a text as :meth:`warm` does, unless it is known, and keeps it from being evicted
        until :meth:`unpin` or :meth:`close`; returns the chunks that stay."""
        ids, boundaries = self._read_one(text, header)
        self._warm(ids, cache_salt, boundaries)
        return self._runtime.store.pin(self._runtime.root(cache_salt), ids)

    def unpin(self, text: Prompt, header: str | None = None, *, cache_salt: str = "") -> int:
        """Takes a :meth:`pin` of the same text back; returns the chunks it concerned."""
        self._check_open()
        ids, _ = self._read_one(text, header)
        return self._runtime.store.unpin(self._runtime.root(cache_salt), ids)

    def forget(self, text: Prompt) -> int:
        """Forgets a text that this model has read, on every tier, whatever stood before it and
        under whatever salt: every chunk that holds it (of a long one: 32 tokens in a row of it),
        and every chunk that was read behind one of those. Requests that run meanwhile are not
        kept. Returns how many chunks there were. Raises ``ForgetError`` if some could not be
        removed. Other processes keep what they hold in memory."""
        self._check_open()
        ids = (
            [self._prompts.read(text)] if not isinstance(text, str) else self._prompts.inside(text)
        )
        return self._runtime.store.forget_text(ids)

    def clear(self) -> None:
        """Forgets everything that was read, in memory and on disk. What a remote store shares
        with other machines stays."""
        self._check_open()
        self._runtime.store.clear()

    def check_integrity(self) -> list[str]:
        """What does not add up in the cache's own books, across all tiers; empty when all is
        well."""
        return self._runtime.store.check_integrity()

    def flush(self) -> None:
        """Writes what is in memory alone to disk and remote store, now rather than soon."""
        self._runtime.store.flush()

    def forget_salt(self, cache_salt: str) -> int:
        """Forgets everything that was read under ``cache_salt``, on every tier; returns how many
        chunks there were."""
        self._check_open()
        return self._runtime.store.forget(self._runtime.root(cache_salt))

    def close(self) -> None:
        """Ends what is running, lets go of the cache and gives the model its own attention
        back. In a forked child it does nothing: the engine belongs to the parent."""
        if os.getpid() != self._pid:
            return
        self._loop.close()
        self._auditor.close()
        self._closed = True
        self._runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise KVBoostError("this engine is closed; make another one")
        if os.getpid() != self._pid:
            raise KVBoostError(
                f"this engine belongs to process {self._pid}, and process {os.getpid()} is a fork "
                "of it: threads and locks do not survive a fork; make the engine in the child"
            )

    def _begin(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        mode: GenerationMode | str,
        options: RequestOptions,
    ) -> RequestState:
        """A checked request. Its clock starts here."""
        clock = Clock()
        params, reuse = split(max_new_tokens, options)
        for token in params.logit_bias or ():
            within(token, 0, self.vocab_size - 1, "logit_bias: a token id")
        request = self._request(
            self._prompts.read(prompt),
            mode,
            params,
            options.get("keep", True),
            options.get("boundaries", ()),
            **reuse,
        )
        clock.lap("tokenize")
        return RequestState(request, clock)

    def _submit(self, state: RequestState, timeout: float | None) -> AsyncTextStream:
        stream = AsyncTextStream(state)
        ticket = self._loop.submit(state, stream, timeout=timeout)
        stream.on_close(lambda: self._loop.cancel(ticket))
        return stream

    def _read_one(self, text: Prompt, header: str | None) -> tuple[TokenIds, Sequence[int]]:
        """The ids of one text to be warmed, and where it begins in them if that matters."""
        if isinstance(text, str):
            ids, start = self._prompts.read_document(text, header)
            return ids, (start,) if self.config.chunking == "document" else ()
        if header is not None:
            raise PromptError("header= goes with text given as a string or several")
        return self._prompts.read(text), ()

    def _warm(self, token_ids: TokenIds, salt: str, boundaries: Sequence[int] = ()) -> int:
        mode = GenerationMode.PREFIX_CACHE
        request = self._request(token_ids, mode, boundaries=boundaries, cache_salt=salt)
        return Generation(self._runtime, RequestState(request)).read()

    def _request(
        self,
        token_ids: TokenIds,
        mode: GenerationMode | str,
        params: SamplingParams | None = None,
        keep: bool = True,
        boundaries: Sequence[int] = (),
        **reuse: Unpack[ReuseOptions],
    ) -> Request:
        self._check_open()
        if self.context_length is not None and len(token_ids) >= self.context_length:
            raise ContextLengthError(len(token_ids), self.context_length)
        params = params or SamplingParams(max_new_tokens=1)
        repair = self.config.repair
        return make_request(token_ids, mode, params, repair, keep, boundaries, **reuse)


def _optional_bytes(size: int | str | None, option: str) -> int | None:
    return None if size is None else parse_bytes(size, option)


def _is_documents(text: object) -> TypeGuard[Sequence[str]]:
    return (
        isinstance(text, Sequence)
        and not isinstance(text, str)
        and bool(text)
        and isinstance(text[0], str)
    )
