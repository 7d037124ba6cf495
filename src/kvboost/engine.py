"""KVBoost, the public face: checks what is asked and hands it to the pipeline."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import torch

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
from kvboost.model.load import LoadedModel, load, wrap
from kvboost.pipeline import Pipeline
from kvboost.results import (
    Clock,
    GenerationResult,
    ReuseReport,
    VerificationReport,
)
from kvboost.stream import Request, Run, TextStream
from kvboost.tokens.hashing import TokenIds, as_token_ids
from kvboost.tokens.prompt import Prompt, PromptReader
from kvboost.verify import verify

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


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
        self._pipeline = Pipeline(model, self.config)
        self._closed = False

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
        return TextStream(self._pipeline.serve(request, run), run, request)

    def plan(
        self,
        prompt: Prompt,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        *,
        cache_salt: str = "",
    ) -> ReuseReport:
        """How a prompt would be served now. Runs nothing, counts nothing."""
        request = self._request(self._prompts.read(prompt), mode, cache_salt)
        return self._pipeline.plan(request)

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
        return self._pipeline.read(request)

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
        return self._pipeline.score(request, len(follow))

    def verify_correctness(self, max_new_tokens: int = 32) -> VerificationReport:
        """Answers built-in prompts with and without reuse and compares. The report is truthy only
        if most of the prompt tokens were reused and the answers agreed."""
        return verify(self, max_new_tokens)

    def cache_stats(self) -> dict[str, Any]:
        """What the cache holds and what it has done. ``cache_hits`` are chunks that served rows,
        wholly or in part; ``cache_misses`` are the chunks that computed rows would fill."""
        store = self._pipeline.store.stats()
        totals = self._pipeline.totals()
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
            "idle_kv_bytes": self._pipeline.pool.idle_bytes,
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
        self._pipeline.store.clear()

    def forget_salt(self, cache_salt: str) -> None:
        """Forgets everything that was read under ``cache_salt``."""
        self._pipeline.store.forget(self._pipeline.root(cache_salt))

    def close(self) -> None:
        """Lets go of the cache and gives the model its own attention back."""
        self._closed = True
        self._pipeline.store.close()
        self._pipeline.pool.clear()
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


def _sampling_params(max_new_tokens: int, options: SamplingOptions) -> SamplingParams:
    known = {option.name for option in fields(SamplingParams)}
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; there are {', '.join(sorted(known))}")
    given: dict[str, Any] = {**options, "stop": stop_strings(options.get("stop"))}
    return SamplingParams(max_new_tokens=max_new_tokens, **given)
