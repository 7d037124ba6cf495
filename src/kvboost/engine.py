"""KVBoost, the public face: checks requests and hands them to the runtime."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch

from kvboost.chat.parser import AnswerParser, collect
from kvboost.chat.tool_use import ToolUse, tool_use
from kvboost.checks.calibrate import calibrate
from kvboost.checks.verify import verify
from kvboost.config import (
    DEFAULT_MODEL,
    WITHOUT_RATIO,
    EngineConfig,
    EngineOptions,
    GenerationMode,
    HubOptions,
    LoadOptions,
    SamplingParams,
    at_least,
    format_bytes,
    home,
    refuse_unknown_options,
    stop_strings,
    whole,
    within,
)
from kvboost.errors import (
    ConfigError,
    ContextLengthError,
    KVBoostError,
    PinError,
    PromptError,
)
from kvboost.model.adapters.adapter import AppliedAdapter
from kvboost.model.embedding import run_steps
from kvboost.model.load import LoadedModel, load, machine_key, wrap
from kvboost.model.streaming.plan import DeviceBudget
from kvboost.progress import Progress
from kvboost.results import (
    AdapterInfo,
    Arrangement,
    Calibration,
    Clock,
    GenerationResult,
    HealReport,
    Pin,
    ReuseReport,
    Score,
    VerificationReport,
)
from kvboost.reuse.arrange import arrange
from kvboost.runtime.embedding import LoadedModelEmbedder
from kvboost.runtime.facts import facts_of
from kvboost.runtime.generation import Generation, text_pieces
from kvboost.runtime.healing import Healer
from kvboost.runtime.loop import Loop
from kvboost.runtime.options import (
    BatchOptions,
    RequestOptions,
    ReuseOptions,
    make_request,
    refuse_unknown,
    split,
)
from kvboost.runtime.recording import record_graphs
from kvboost.runtime.request import Request, RequestState
from kvboost.runtime.runtime import Runtime
from kvboost.runtime.streams import AsyncTextStream, TextStream
from kvboost.runtime.verified import make_generation
from kvboost.structured.formats import FORMATS, grammar_for
from kvboost.structured.grammars import Grammar, Grammars
from kvboost.tokens.hashing import TokenIds, as_token_ids, pin_name
from kvboost.tokens.prompt import Conversation, Prompt, PromptReader

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


log = logging.getLogger("kvboost")

T = TypeVar("T")
PREVIEW_TOKENS = 48

MakeRuntime = Callable[[LoadedModel, EngineConfig, Path | None], Runtime]


class KVBoost:
    """A model that does not read the same text twice. Thread-safe."""

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig | None = None,
        costs: Path | None = None,
        make_runtime: MakeRuntime = Runtime,
    ) -> None:
        """Most callers want :meth:`from_pretrained` or :meth:`from_model`. ``costs`` is a file
        that keeps the learned cost of forwards."""
        self.config = config or EngineConfig()
        self._model = model
        self._prompts = PromptReader(model.tokenizer, model.vocab_size)
        self._runtime = make_runtime(model, self.config, costs)
        if self.config.recompute_tolerance is None:
            calibrated = self._runtime.cost.tolerance
            self.config = replace(self.config, recompute_tolerance=calibrated)
        self._grammars = Grammars(
            model.tokenizer.serialized,
            max(model.vocab_size, model.tokenizer.size),
            model.eos_ids or model.tokenizer.eos_ids,
        )
        self._healer = Healer(
            self._runtime, self.config.max_audit_kl, lambda: self.config.repair, self._repair_more
        )
        self._loop = Loop(self._runtime, self.config, self._healer)
        self._closed = False
        self._pid = os.getpid()

    @classmethod
    def from_pretrained(
        cls,
        model_name: str | os.PathLike[str] = DEFAULT_MODEL,
        *,
        strict: bool = True,
        device: str | torch.device | None = None,
        dtype: str | torch.dtype | None = None,
        tp_size: int = 1,
        model_kwargs: Mapping[str, Any] | None = None,
        **options: Unpack[LoadOptions],
    ) -> Self:
        """Loads a model: a bundled name, a folder, a ``.gguf`` file or a hub id.

        ``strict`` refuses architectures whose text can never be moved; ``strict=False`` serves
        them with exact prefix reuse. ``device`` and ``dtype`` default to what suits the machine.
        ``tp_size`` splits the model over so many GPUs of this machine, each served by a process
        that the engine starts; it must divide the model's KV heads.

        Options of the engine, with their defaults; :class:`EngineConfig` explains each. Sizes are
        bytes or strings such as ``"2GiB"``.

        - memory: ``max_cache_bytes="2GiB"``, ``max_chunks=None``, ``max_pinned_bytes=None``,
          ``gpu_cache_bytes=None``, ``kv_cache_bits=16``, ``key_norms=False``
        - other tiers: ``disk_cache_dir=None``, ``disk_cache_bytes="20GiB"``,
          ``remote_cache_url=None``, ``remote_cache_bytes=None``, ``cache_secret=None``
        - chunks: ``chunk_size=128``, ``chunking="fixed"``, ``document_markers="\\n\\n"``
        - moved text: ``recompute_strategy="auto"``, ``recompute_ratio=0.15``,
          ``recompute_tolerance=None``, ``recompute_overlap=16``, ``reuse_moved="when_faster"``,
          ``heal="auto"``, ``max_audit_kl=None``
        - requests: ``max_running=16``, ``max_waiting=256``, ``max_kv_bytes=None``,
          ``far_kv_bytes=0``, ``far_kv_bits=16``, ``far_kv_dir=None``, ``sharing_wait=2.0``,
          ``step_rows=None``, ``prefill_slice=None``, ``graphs="auto"``
        - drafts: ``speculate="auto"``, ``draft_model=None``
        - quantised models: ``weights="auto"``
        - models larger than the GPU: ``device_memory=None``, ``host_memory=None``
        - routers: ``kv_events=None``

        Options of transformers' ``from_pretrained`` that have a name here (``HubOptions``, such as
        ``revision``, ``token`` or ``trust_remote_code``) are passed on; any others go into
        ``model_kwargs``. An unknown option raises ConfigError before anything is loaded.
        """
        refuse_unknown_options(options, LoadOptions)
        hub: dict[str, Any] = {
            name: value for name, value in options.items() if name in HubOptions.__annotations__
        }
        engine: Any = {name: value for name, value in options.items() if name not in hub}
        config = EngineConfig(**engine)
        more: dict[str, Any] = {**hub, **(model_kwargs or {})}
        make_runtime: MakeRuntime = Runtime
        whole(tp_size, 1, "tp_size")
        if tp_size > 1 and config.device_memory is not None:
            raise ConfigError("device_memory streams the layers of one GPU; leave out tp_size")
        if tp_size == 1:
            model = load(
                model_name,
                strict=strict,
                device=device,
                dtype=dtype,
                weight_form=config.weights,
                budget=DeviceBudget.of(config),
                **more,
            )
        else:  # not every build of torch has torch.distributed
            if config.weights == "packed":
                raise ConfigError(
                    f"weights='packed' is for one device, and tp_size is {tp_size}; use "
                    "weights='plain'"
                )
            from kvboost.runtime.parallel.runtime import (
                ParallelRuntime,
                load_parallel,
                start_ranks,
            )

            ranks = start_ranks(model_name, tp_size, strict=strict, device=device, **more)
            model = load_parallel(ranks, model_name, {"strict": strict, "dtype": dtype, **more})
            make_runtime = partial(ParallelRuntime, ranks)
        costs = home() / "costs" / f"{machine_key(model, tp_size)}.json"
        made = cls(model, config, costs, make_runtime)
        if config.graphs == "auto":
            record_graphs(made._runtime, config.max_running)
        return made

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any,
        *,
        strict: bool = True,
        config: EngineConfig | None = None,
        **options: Unpack[EngineOptions],
    ) -> Self:
        """Takes a transformers model and tokenizer that are already in memory. ``options`` are
        those of the engine, see :meth:`from_pretrained`; they override those of ``config``.

        Until :meth:`close`, KVBoost replaces the model's attention, and its weights must not
        change; switching between named adapters is fine."""
        refuse_unknown_options(options, EngineOptions)
        chosen: Any = options
        config = replace(config or EngineConfig(), **chosen)
        if config.device_memory is not None:
            raise ConfigError(
                "device_memory moves a model to the GPU, layer by layer: use from_pretrained"
            )
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

    @property
    def failure(self) -> KVBoostError | None:
        """Why this engine can serve no more requests, if something has failed for good."""
        return self._runtime.failure

    @property
    def notes(self) -> list[str]:
        """What runs slower on this GPU than it could, and why. Graphs are recorded while requests
        run, so there may be more notes later."""
        return self._runtime.notes()

    def facts(self) -> dict[str, Any]:
        """The model, the device and the options that decide what an answer costs."""
        return facts_of(self._model, self.config)

    def encode(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt."""
        ids: list[int] = self._prompts.read(prompt).tolist()
        return ids

    def locate(self, text: str, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """Where a text is in a prompt: the first token that is its own and the one after its last.
        None if it is not there, or is tokenized differently there."""
        return self._prompts.locate(text, token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._model.tokenizer.decode(token_ids)

    def generate(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult:
        """Answers a prompt. Text that was read before is not read again.

        Greedy unless ``temperature``, ``top_k``, ``top_p`` or ``min_p`` is given. ``seed`` makes
        sampling repeatable; ``stop`` is a string or several; ``logprobs=k`` adds the k likeliest
        tokens of each step. Requests with different ``cache_salt`` never share KV.
        ``recompute_strategy`` and ``recompute_ratio`` say how moved text is repaired;
        ``keep=False`` leaves nothing of this request in the cache; ``boundaries`` says where its
        documents begin. ``adapter`` names an adapter of :meth:`load_adapter`.
        ``exactness="verified"`` gives the answer of a full prefill, also over
        moved text; ``heal`` overrides the engine's. ``speculate`` says whether tokens are drafted
        and checked several at a time, which changes no answer: ``"auto"``, ``"off"`` or the most
        tokens of a draft.

        ``schema`` (a JSON schema or a model of pydantic's), ``regex``, ``grammar`` or ``choice``
        says what the answer must look like; it then ends where the format does, unless
        ``max_new_tokens`` ends it before. This needs the extra ``structured``.
        """
        return _whole(self.stream(prompt, max_new_tokens, mode, **options))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        max_new_tokens: int = 64,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str = "auto",
        template_options: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult:
        """Answers a conversation in the model's own chat template.

        ``tools`` are in OpenAI's format. ``tool_choice`` is ``"auto"``, ``"none"``, ``"required"``
        or the name of a tool; the last two need the extra ``structured``. The result's
        ``tool_calls`` and ``content`` are the parts of the answer, ``output_text`` is all of it.
        ``template_options`` go to the template, such as ``{"enable_thinking": False}``.
        """
        clock = Clock()
        if isinstance(messages, str):
            raise PromptError("chat() takes messages; give text to generate()")
        use = tool_use(tools, tool_choice)
        ids = self.encode(Conversation(messages, use.offered, template_options or {}))
        prepared: Any = self.answer_options(ids, use, options)
        state = self._begin(ids, max_new_tokens, mode, prepared, clock)
        result = _whole(self._stream(state))
        parser = self.answer_parser(ids, use)
        if parser is None:
            return result
        parts = parser.feed(result.output_text) + parser.finish()
        return replace(result, parsed=collect(parts))

    def answer_options(
        self, prompt_ids: Sequence[int], use: ToolUse, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The options of a chat request as those of :meth:`generate`: the format covers reasoning
        and calls of tools as well. Compiles it, see :meth:`compile_format`."""
        tokenizer, answer = self._model.tokenizer, grammar_for(options)
        grammar = use.grammar(tokenizer.style, answer, tokenizer.reasoning_after(prompt_ids))
        prepared = {name: value for name, value in options.items() if name not in FORMATS}
        if grammar is not None:
            given = [name for name in FORMATS if options.get(name) is not None]
            self._grammars.compile(grammar, "tools" if use.is_forced or not given else given[0])
            prepared["grammar"] = grammar
        if stops := use.stops(tokenizer.style, grammar):
            prepared["stop"] = [*stop_strings(options.get("stop")), *stops]
        if tokenizer.writes_special_tokens and not use.is_forced:
            prepared["skip_special_tokens"] = False
        return prepared

    def answer_parser(self, prompt_ids: Sequence[int], use: ToolUse) -> AnswerParser | None:
        """What splits the answer to a chat request into content, reasoning and calls of tools; None
        if it has content only."""
        return self._model.tokenizer.answer_parser(prompt_ids, use)

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int = 64,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        **options: Unpack[RequestOptions],
    ) -> TextStream:
        """Like :meth:`generate`, as an iterator of text pieces; ``.result`` is complete after the
        last one. Closing the stream early, or leaving its ``with`` block, keeps what was read.
        """
        return self._stream(self._begin(prompt, max_new_tokens, mode, options))

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        max_new_tokens: int = 64,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        *,
        each: Sequence[BatchOptions] | None = None,
        **options: Unpack[RequestOptions],
    ) -> list[GenerationResult]:
        """Answers several prompts at once, each as :meth:`generate` would, in less time: one step
        computes the next token of every running prompt, and shared text is read once. ``each``
        holds options for single prompts, ``max_new_tokens`` and ``mode`` among them; they override
        the options for all. The first failure is raised once all have ended."""
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
        """Like :meth:`stream`, for coroutines; any number of requests run at once. The request is
        queued immediately; ``QueueFullError`` says when to retry. After ``timeout`` seconds it ends
        with ``finish_reason="timeout"``."""
        if timeout is not None:
            at_least(timeout, 0.0, "timeout")
        return self._submit(self._begin(prompt, max_new_tokens, mode, options), timeout)

    async def awarm(
        self,
        text: Prompt,
        header: str | None = None,
        *,
        cache_salt: str = "",
        adapter: str | None = None,
    ) -> int:
        """Like :meth:`warm` of one text, for coroutines."""
        ids, boundaries = await asyncio.to_thread(self._read_one, text, header)
        return await self._awarm(ids, cache_salt, boundaries, adapter)

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Embeddings ``[texts, dimensions]`` by the loaded model: the mean of the last hidden
        states, normalised. Nothing is cached. :class:`EmbeddingModel` loads a model that was
        trained for this, which finds the right text more often."""
        self._check_open()
        if isinstance(texts, str):
            raise PromptError("embed() takes several texts; give one in a list")
        ids = [self.encode(text) for text in texts]
        for some in ids:
            if self.context_length is not None and len(some) > self.context_length:
                raise ContextLengthError(len(some), self.context_length)
        return run_steps(self.embedder.steps(ids))

    @property
    def embedder(self) -> LoadedModelEmbedder:
        """What computes embeddings with the loaded model, slice by slice."""
        return LoadedModelEmbedder(self._runtime)

    def between_steps(self, work: Callable[[], T]) -> Future[T]:
        """Runs ``work`` in the thread that computes answers, between two of its steps: for short
        pieces of other work on the same device, such as embeddings. Answers wait for one piece at
        a time."""
        self._check_open()
        return self._loop.between_steps(work)

    async def adrain(self, timeout: float | None = None) -> bool:
        """Takes no new requests and waits for the others to end; False if that took longer than
        ``timeout`` seconds."""
        return await asyncio.to_thread(self._loop.drain, timeout)

    def compile_format(self, options: Mapping[str, Any]) -> Grammar | None:
        """The grammar of the format in ``options`` (``schema``, ``regex``, ``grammar`` or
        ``choice``); None if there is none. Later requests with the same format find it compiled: a
        large schema takes up to a second, and the first grammar of an engine another one. Raises
        ``StructuredOutputError`` if answers cannot be held to the format."""
        grammar = grammar_for(options)
        if grammar is None:
            return None
        option = next(name for name in FORMATS if options.get(name) is not None)
        return self._grammars.compile(grammar, option)

    def load_adapter(
        self, name: str, path: str | os.PathLike[str], *, in_place: bool = False
    ) -> AdapterInfo:
        """Loads the LoRA adapter in the folder ``path``, as PEFT writes it, while requests run.
        Requests name it with ``adapter=name``; one batch may hold any number of adapters.
        ``in_place`` replaces the adapter of that name. Raises ``AdapterError`` if it does not fit
        the model, or if a part of it is not supported."""
        self._check_open()
        return self._runtime.adapters.load(name, path, in_place=in_place)

    def unload_adapter(self, name: str) -> AdapterInfo:
        """Takes an adapter away. Requests that run finish with it. What is cached of it leaves the
        memory, and stays on disk for when the same adapter is loaded again, under any name."""
        self._check_open()
        return self._runtime.adapters.unload(name)

    def adapters(self) -> dict[str, AdapterInfo]:
        """The loaded adapters, by name."""
        return self._runtime.adapters.infos()

    def serving_stats(self) -> dict[str, Any]:
        """The requests of batches, coroutines and the server: how many wait and run, their KV, and
        totals."""
        return self._loop.stats().as_dict()

    def estimate_ms(self, num_tokens: int) -> float | None:
        """How long reading ``num_tokens`` would take without reuse; None until forwards have been
        measured."""
        return self._runtime.estimate_ms(num_tokens)

    def chunks(self, limit: int = 20) -> list[dict[str, Any]]:
        """The most valuable chunks in memory: those that would be evicted last come first."""
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
        """How a prompt would be served now. Runs nothing and counts nothing. The model decides
        which moved rows to recompute, so the plan does not name them."""
        refuse_unknown(options, set(ReuseOptions.__annotations__))
        return self._runtime.plan(self._request(self._prompts.read(prompt), mode, **options))

    def warm(
        self,
        text: Prompt | Sequence[str],
        position_offset: int = 0,
        header: str | None = None,
        *,
        cache_salt: str = "",
        adapter: str | None = None,
        progress: bool = True,
    ) -> int:
        """Reads one document or several and keeps them; returns the number of new chunks.

        A text is read after ``header``. Without a header it is read as the beginning of a user's
        first message in the model's chat template; ``header=""`` reads it alone. It then serves
        anywhere in a prompt, and exactly if everything before it is the same too. Token ids and
        messages are read as they are. Only requests with the same ``adapter`` can use it.

        Reading several documents shows a progress bar if standard error is a terminal;
        ``progress=False`` hides it.
        """
        if position_offset != 0:
            raise ConfigError(
                f"position_offset={position_offset!r} is not needed: what is read serves at any "
                "position; to read it after other text, give that text as header"
            )
        if not _is_documents(text):
            ids, boundaries = self._read_one(cast(Prompt, text), header)
            return self._warm(ids, cache_salt, boundaries, adapter)
        with (
            Progress("reading documents", only_on_terminal=True, show=progress) as shown,
            shown.step("read", len(text)) as step,
        ):
            new = 0
            for document in text:
                ids, boundaries = self._read_one(document, header)
                new += self._warm(ids, cache_salt, boundaries, adapter)
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
        """Puts ``documents`` into the order with the longest exact hit, and says what that is
        expected to save. The prompt is ``header``, documents, ``question``; with ``header=None``
        it follows the model's chat template."""
        if isinstance(documents, str) or not documents:
            raise PromptError(f"documents={documents!r} must be several strings")
        before, after = self._prompts.frame(header, question)
        return arrange(
            before,
            [self._prompts.join(text) for text in documents],
            after,
            lambda ids: self._runtime.known_exactly(ids, cache_salt),
        )

    def score(
        self,
        prompt: Prompt,
        continuation: Sequence[int],
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        **options: Unpack[ReuseOptions],
    ) -> Score:
        """The logits ``[len(continuation), vocab]`` from which each token of ``continuation`` would
        be chosen after ``prompt``. Keeps nothing."""
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
        """Finds how little of moved text may be recomputed so that the answers to ``samples`` stay
        within ``max_kl`` of a full prefill, and uses it from now on. With ``auto`` this is the
        tolerance, which is kept with the model's costs for later processes; with other strategies
        it is the ratio. Read the documents of the samples first, with :meth:`warm` or in other
        requests."""
        if self.config.recompute_strategy in WITHOUT_RATIO:
            raise ConfigError(
                f"recompute_strategy={self.config.recompute_strategy!r} has no ratio to calibrate; "
                "use 'auto', 'query' or 'cacheblend'"
            )
        found = calibrate(self, samples, max_kl, self.config.repair, cache_salt)
        self.config = replace(self.config, recompute_ratio=found.ratio)
        if found.tolerance is not None:
            self.config = replace(self.config, recompute_tolerance=found.tolerance)
            self._runtime.cost.tolerance = found.tolerance
            self._runtime.cost.save()
        return found

    def heal(self, timeout: float | None = None) -> HealReport:
        """Computes the rows that requests have left approximate, exactly, and keeps them instead:
        the conversations are then what a full prefill would have left. Batches, coroutines and a
        server need not call it: their loop heals whenever it is idle. Ends after ``timeout``
        seconds at the latest; requests of the loop go first."""
        self._check_open()
        if timeout is not None:
            at_least(timeout, 0.0, "timeout")
        return self._healer.heal(timeout, self._loop.is_busy, self._loop.wait_idle)

    def verify_correctness(self, max_new_tokens: int = 32) -> VerificationReport:
        """Answers built-in prompts with and without reuse and compares the answers. The report is
        truthy only if most prompt tokens were reused and the answers agree."""
        return verify(self, max_new_tokens)

    def cache_stats(self) -> dict[str, Any]:
        """What the cache holds, and totals. ``cache_hits`` are chunks that served rows, wholly or
        in part; ``cache_misses`` are the chunks that the computed rows would fill. ``healing``:
        approximate rows and what became of them; ``audit``: how far answers over moved text were
        from exact ones."""
        return {
            **self._runtime.stats(),
            "healing": self._healer.stats(),
            "audit": {
                **self._healer.audit_stats(),
                "recompute_ratio": self.config.recompute_ratio,
            },
        }

    def pin(
        self,
        text: Prompt,
        header: str | None = None,
        *,
        ttl: float | None = None,
        cache_salt: str = "",
    ) -> Pin:
        """Reads a text as :meth:`warm` does, unless it is cached, and protects it from eviction on
        the GPU, in memory and on disk: for ``ttl`` seconds, or until :meth:`unpin` or
        :meth:`close`. To pin it again renews it. Raises ``PinError`` if there is no room: pins may
        take ``max_pinned_bytes``. A pin ends with the process; what is on disk stays there, and
        pinning it in the next process computes nothing."""
        ids, boundaries = self._read_one(text, header)
        _check_ttl(ttl)
        self._warm(ids, cache_salt, boundaries)
        return self._pin_all(ids, ttl, cache_salt)

    async def apin(
        self,
        text: Prompt,
        header: str | None = None,
        *,
        ttl: float | None = None,
        cache_salt: str = "",
    ) -> Pin:
        """Like :meth:`pin`, for coroutines."""
        _check_ttl(ttl)
        ids, boundaries = await asyncio.to_thread(self._read_one, text, header)
        await self._awarm(ids, cache_salt, boundaries)
        return self._pin_all(ids, ttl, cache_salt)

    def unpin(self, text: Prompt, header: str | None = None, *, cache_salt: str = "") -> Pin | None:
        """Undoes :meth:`pin` of the same text; returns what was pinned, None if nothing was."""
        ids, _ = self._read_one(text, header)
        return self.drop_pin(pin_name(self._runtime.root(cache_salt), ids))

    def pin_cached(
        self,
        name: str,
        prompt: Prompt,
        *,
        ttl: float | None = None,
        cache_salt: str = "",
        adapter: str | None = None,
    ) -> Pin:
        """Pins what is cached of a prompt under a name, and computes nothing: for conversations,
        whose KV is in the cache as soon as they are answered.

        The same call renews a pin: it replaces what ``name`` had pinned, so a pin grows with its
        conversation (``prompt`` = the token ids of the prompt and the answer) and lasts another
        ``ttl`` seconds. :meth:`drop_pin` ends it. Rows that are still approximate are pinned too,
        and the exact ones instead once they are healed. Takes a few milliseconds at most, so a
        coroutine may call it with token ids. Raises ``PinError`` if there is no room, and leaves
        the earlier pin as it was; callers that can do without a pin should catch it."""
        self._check_open()
        _check_ttl(ttl)
        ids = self._prompts.read(prompt)
        return self._runtime.store.pin(
            name,
            self._runtime.adapters.root(cache_salt, self._applied(adapter, ids)),
            ids,
            repair=self.config.repair.name,
            ttl=ttl,
        )

    def drop_pin(self, name: str) -> Pin | None:
        """Ends the pin of that name; returns what it was, None if there is none."""
        self._check_open()
        return self._runtime.store.unpin(name)

    def pins(self) -> list[Pin]:
        """All pins with their sizes and the time that is left, those that end first first."""
        self._check_open()
        return self._runtime.store.pins()

    def forget(self, text: Prompt) -> int:
        """Forgets a text on every tier, after any prefix and under any salt: every chunk that holds
        it (of a long text: 32 consecutive tokens of it), and every chunk that was computed after
        one of those. Requests that run at the same time are not kept. Returns the number of
        chunks. Raises ``ForgetError`` if some could not be removed. Other processes keep what they
        hold in memory."""
        self._check_open()
        ids = (
            [self._prompts.read(text)] if not isinstance(text, str) else self._prompts.inside(text)
        )
        return self._runtime.store.forget_text(ids)

    def clear(self) -> None:
        """Forgets everything in memory and on disk. The remote store, which other machines share,
        keeps its chunks."""
        self._check_open()
        self._runtime.store.clear()

    def reset_cache(self) -> None:
        """The name of :meth:`clear` in version 0.9."""
        self.clear()

    def check_integrity(self) -> list[str]:
        """Inconsistencies in the cache's own records, across all tiers; empty if there are none. On
        a GPU also pages that are held although no request runs."""
        return self._runtime.check_integrity()

    def flush(self) -> None:
        """Writes chunks that are only in memory to disk and to the remote store now."""
        self._runtime.store.flush()

    def forget_salt(self, cache_salt: str) -> int:
        """Forgets everything that was read under ``cache_salt``, on every tier, with no adapter and
        with each that this engine has had; returns the number of chunks."""
        self._check_open()
        runtime = self._runtime
        return sum(map(runtime.store.forget, runtime.adapters.roots_of_salt(cache_salt)))

    def close(self) -> None:
        """Cancels running requests, closes the cache and restores the model's own attention. In a
        forked child it does nothing: the engine belongs to the parent."""
        if os.getpid() != self._pid:
            return
        self._loop.close()
        self._healer.close()
        self._closed = True
        self._runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        if self._closed:
            return f"KVBoost({self.model_name!r}, {self.device}, {dtype}, closed)"
        tiers = [f"{format_bytes(self.config.max_cache_bytes)} in memory"]
        if self.config.disk_cache_dir is not None:
            size = format_bytes(self.config.disk_cache_bytes)
            tiers.append(f"{size} in {os.fspath(self.config.disk_cache_dir)!r}")
        if self.config.remote_cache_url is not None:
            tiers.append("a remote store")  # its address may hold a password
        return f"KVBoost({self.model_name!r}, {self.device}, {dtype}, cache: {', '.join(tiers)})"

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
        clock: Clock | None = None,
    ) -> RequestState:
        """A checked request. Its clock starts here, unless the caller has started it."""
        clock = clock or Clock()
        params, reuse = split(max_new_tokens, options)
        for token in params.logit_bias or ():
            within(token, 0, self.vocab_size - 1, "logit_bias: a token id")
        request = self._request(
            self._prompts.read(prompt),
            mode,
            params,
            options.get("keep", True),
            options.get("boundaries", ()),
            options.get("tenant", ""),
            options.get("heal"),
            options.get("exactness", "repaired"),
            self.compile_format(options),
            options.get("speculate"),
            **reuse,
        )
        clock.lap("tokenize")
        return RequestState(request, clock)

    def _stream(self, state: RequestState) -> TextStream:
        steps = make_generation(self._runtime, state).steps()
        return TextStream(text_pieces(self._model.forward, steps, state), state)

    def _repair_more(self, mean_kl: float) -> None:
        """The audit found answers that were further than ``max_audit_kl`` from exact ones."""
        ratio = min(1.0, 2 * self.config.recompute_ratio or 0.15)
        if ratio != self.config.recompute_ratio:
            log.warning(
                "answers over moved text had a mean KL of %.3f, more than max_audit_kl=%s: "
                "recompute_ratio is %.2f from now on",
                mean_kl,
                self.config.max_audit_kl,
                ratio,
            )
            self.config = replace(self.config, recompute_ratio=ratio)

    def _submit(self, state: RequestState, timeout: float | None) -> AsyncTextStream:
        stream = AsyncTextStream(state)
        job = self._loop.submit(state, stream, timeout=timeout)
        stream.on_close(lambda: self._loop.cancel(job))
        return stream

    def _read_one(self, text: Prompt, header: str | None) -> tuple[TokenIds, Sequence[int]]:
        """The ids of one text to warm, and its boundary if documents are cut on their own."""
        if isinstance(text, str):
            ids, start = self._prompts.read_document(text, header)
            return ids, (start,) if self.config.chunking == "document" else ()
        if header is not None:
            raise PromptError("header= goes with text given as a string or several")
        return self._prompts.read(text), ()

    def _warm(
        self,
        token_ids: TokenIds,
        salt: str,
        boundaries: Sequence[int] = (),
        adapter: str | None = None,
    ) -> int:
        state = self._reading(token_ids, salt, boundaries, adapter)
        return Generation(self._runtime, state).read()

    async def _awarm(
        self,
        token_ids: TokenIds,
        salt: str,
        boundaries: Sequence[int],
        adapter: str | None = None,
    ) -> int:
        state = self._reading(token_ids, salt, boundaries, adapter)
        async with self._submit(state, None) as stream:
            async for _ in stream:
                pass
        return stream.new_chunks

    def _reading(
        self, token_ids: TokenIds, salt: str, boundaries: Sequence[int], adapter: str | None
    ) -> RequestState:
        """A request that reads a text and answers nothing."""
        request = self._request(
            token_ids,
            GenerationMode.PREFIX_CACHE,
            boundaries=boundaries,
            cache_salt=salt,
            adapter=adapter,
        )
        return RequestState(request)

    def _pin_all(self, token_ids: TokenIds, ttl: float | None, salt: str) -> Pin:
        root = self._runtime.root(salt)
        name = pin_name(root, token_ids)
        pin = self._runtime.store.pin(name, root, token_ids, ttl=ttl)
        if pin.tokens < len(token_ids):
            self.drop_pin(name)
            raise PinError(
                f"only {pin.tokens:,} of {len(token_ids):,} tokens are in the cache after reading "
                "them, so they cannot be pinned; raise max_cache_bytes"
            )
        return pin

    def _applied(self, adapter: str | None, token_ids: TokenIds) -> AppliedAdapter | None:
        if adapter is None:
            return None
        return self._runtime.adapters.get(adapter).applied_to(token_ids)

    def _request(
        self,
        token_ids: TokenIds,
        mode: GenerationMode | str,
        params: SamplingParams | None = None,
        keep: bool = True,
        boundaries: Sequence[int] = (),
        tenant: str = "",
        heal: str | None = None,
        exactness: str = "repaired",
        grammar: Grammar | None = None,
        speculate: str | int | None = None,
        **reuse: Unpack[ReuseOptions],
    ) -> Request:
        self._check_open()
        others: dict[str, Any] = dict(reuse)
        adapter = others.pop("adapter", None)
        applied = self._applied(adapter, token_ids)
        if self.context_length is not None and len(token_ids) >= self.context_length:
            raise ContextLengthError(len(token_ids), self.context_length)
        params = params or SamplingParams(max_new_tokens=1)
        return make_request(
            token_ids,
            mode,
            params,
            self.config.repair,
            keep,
            boundaries,
            tenant,
            self.config.heal if heal is None else heal,
            exactness,
            grammar,
            applied,
            self.config.speculate if speculate is None else speculate,
            **others,
        )


def _whole(stream: TextStream) -> GenerationResult:
    for _ in stream:
        pass
    return stream.result


def _check_ttl(ttl: float | None) -> None:
    if ttl is not None:
        at_least(ttl, 0.0, "ttl")


def _is_documents(text: object) -> TypeGuard[Sequence[str]]:
    return (
        isinstance(text, Sequence)
        and not isinstance(text, str)
        and bool(text)
        and isinstance(text[0], str)
    )
