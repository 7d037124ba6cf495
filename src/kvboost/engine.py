"""KVBoost, the public face: loads a model, answers, and keeps texts."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from kvboost.chat.answer_options import answer_options
from kvboost.chat.context_edits import edit_context
from kvboost.chat.parser import AnswerParser, with_parts
from kvboost.chat.tool_use import ToolUse, tool_use
from kvboost.checks.calibrate import calibrate
from kvboost.checks.rehearsal import rehearse
from kvboost.checks.verify import verify
from kvboost.config import (
    DEFAULT_MODEL,
    MOST_CONTEXTS,
    EngineConfig,
    EngineOptions,
    GenerationMode,
    HubOptions,
    LoadOptions,
    at_least,
    home,
    refuse_unknown_options,
    whole,
)
from kvboost.errors import ConfigError, KVBoostError, PromptError
from kvboost.model.loading.load import LoadedModel, machine_key, wrap
from kvboost.model.loading.tokenizer import ModelTokenizer
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
from kvboost.results.explaining import Traces
from kvboost.runtime.computing import text_pieces
from kvboost.runtime.documents import Documents, check_ttl
from kvboost.runtime.embedding import LoadedModelEmbedder
from kvboost.runtime.generation import Generation
from kvboost.runtime.healing import Healer
from kvboost.runtime.loading import MakeRuntime, describe, facts_of, fill_in, load_model
from kvboost.runtime.loop import Loop
from kvboost.runtime.options import BatchOptions, RequestOptions, ReuseOptions
from kvboost.runtime.request import RequestState
from kvboost.runtime.requests import Requests
from kvboost.runtime.runtime import Runtime
from kvboost.runtime.settings import Lifetime, Settings
from kvboost.runtime.streams import AnswerListener, AsyncTextStream, TextStream
from kvboost.structured.grammars import Grammar, Grammars
from kvboost.structured.library import missing
from kvboost.tokens.hashing import ChunkKey, TokenIds, as_token_ids, pin_name
from kvboost.tokens.images import ImageReader, ReadPrompt
from kvboost.tokens.prompt import Conversation, Prompt, PromptReader

if TYPE_CHECKING:
    from typing import Self

    from typing_extensions import Unpack

T = TypeVar("T")
PREVIEW_TOKENS = 48


class KVBoost:
    """A model that does not read the same text twice. Thread-safe.

    ``model`` and ``runtime`` are what it is made of, for benchmarks and studies. They may change in
    any release.
    """

    def __init__(
        self,
        model: LoadedModel,
        config: EngineConfig | None = None,
        costs: Path | None = None,
        make_runtime: MakeRuntime = Runtime,
    ) -> None:
        """Most callers want :meth:`from_pretrained` or :meth:`from_model`. ``costs`` is a file
        that keeps the learned cost of forwards."""
        config = config or EngineConfig()
        self.model = model
        self.runtime = runtime = make_runtime(model, config, costs)
        self._settings = Settings(config)
        self._lifetime = Lifetime()
        self._images = model.vision if isinstance(model.vision, str) else model.vision.reader
        self._prompts = PromptReader(
            model.tokenizer, model.vocab_size, self._images, config.image_limits
        )
        self._grammars = Grammars(
            model.tokenizer.serialized,
            max(model.vocab_size, model.tokenizer.size),
            model.eos_ids or model.tokenizer.eos_ids,
        )
        self._requests = Requests(
            runtime, self._prompts, self._grammars, self._settings, self._lifetime
        )
        self._healer = Healer(
            runtime,
            config.max_audit_kl,
            lambda: self._settings.repair,
            self._settings.repair_more,
        )
        self._loop = Loop(runtime, config, self._healer)
        self._documents = Documents(
            runtime,
            self._prompts,
            self._requests,
            self._loop,
            are_cut=config.chunking == "document",
        )

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

        Options of the engine are the fields of :class:`EngineConfig`, which has their defaults and
        explains each. Sizes are bytes or strings such as ``"2GiB"``.

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
        model, make_runtime = load_model(
            model_name,
            config,
            strict=strict,
            device=device,
            dtype=dtype,
            tp_size=tp_size,
            hub_options={**hub, **(model_kwargs or {})},
        )
        config = fill_in(config, engine, model)
        costs = home() / "costs" / f"{machine_key(model, tp_size)}.json"
        made = cls(model, config, costs, make_runtime)
        if config.graphs == "auto":
            made.runtime.backend.record_graphs(config.max_running)
        return made

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any,
        *,
        strict: bool = True,
        image_processor: Any = None,
        config: EngineConfig | None = None,
        **options: Unpack[EngineOptions],
    ) -> Self:
        """Takes a transformers model and tokenizer, and its ``image_processor`` if it is to see.
        ``options`` are those of :meth:`from_pretrained`; they override those of ``config``.

        Until :meth:`close`, KVBoost replaces the model's attention, and its weights must not
        change; switching between named adapters is fine."""
        refuse_unknown_options(options, EngineOptions)
        chosen: Any = options
        config = replace(config or EngineConfig(), **chosen)
        if config.device_memory is not None:
            raise ConfigError(
                "device_memory moves a model to the GPU, layer by layer: use from_pretrained"
            )
        return cls(wrap(model, tokenizer, strict=strict, image_processor=image_processor), config)

    @property
    def config(self) -> EngineConfig:
        """Its options. Calibration and the audit change how much of moved text is repaired."""
        return self._settings.config

    @property
    def model_name(self) -> str:
        """The name that the model was loaded by; ``custom`` after :meth:`from_model`."""
        return self.model.name

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer, as transformers loads it. :meth:`encode` and :meth:`decode` are
        what requests use."""
        return self.model.tokenizer.hf

    @property
    def prompt_tokenizer(self) -> ModelTokenizer:
        """The part of the tokenizer that requests use, with the model's chat template. It can be
        pickled, so that another process reads prompts and writes answers just as this one does."""
        return self.model.tokenizer

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return self.model.eos_ids

    @property
    def image_reader(self) -> ImageReader | str:
        """Reads images for the model; or says, as text, why the model takes none. Can be
        pickled."""
        return self._images

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The type of the numbers that the model computes with."""
        return self.model.forward.shape.dtype

    @property
    def context_length(self) -> int | None:
        """How many tokens a prompt and its answer may have; None if the model has no limit."""
        return self.model.context_length

    @property
    def vocab_size(self) -> int:
        """Token ids are smaller than this."""
        return self.model.vocab_size

    @property
    def failure(self) -> KVBoostError | None:
        """Why this engine can serve no more requests, if something has failed for good."""
        return self.runtime.failure

    @property
    def notes(self) -> list[str]:
        """Why something runs slower here than it could: a dtype that this CPU emulates, or a part
        that has no pages or graphs on this GPU. Graphs are recorded while requests run, so there
        may be more notes later."""
        slow = self.model.slow_dtype
        return [*([] if slow is None else [slow]), *self.runtime.notes()]

    def facts(self) -> dict[str, Any]:
        """The model, the device and the options that decide what an answer costs."""
        return facts_of(self.model, self.config)

    def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt. ``add_special_tokens=False`` takes text as it is, without the
        tokens that the model expects in front: for text of :meth:`render`, which has them."""
        if isinstance(prompt, str) and not add_special_tokens:
            return self.model.tokenizer.encode_fragment(prompt)
        ids: list[int] = self._prompts.read(prompt).tolist()
        return ids

    def read(self, prompt: Prompt, *, add_special_tokens: bool = True) -> ReadPrompt:
        """The token ids of a prompt and its images, which can be given instead of the prompt. The
        rows of images have ids of their own, outside the vocabulary."""
        return self._prompts.read_whole(prompt, add_special_tokens=add_special_tokens)

    def infill(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The token ids of a prompt whose answer stands between two texts, given theirs. Raises
        PromptError if the model cannot fill in the middle."""
        return self.model.tokenizer.infill(before, after)

    def render(self, conversation: Conversation) -> str:
        """The text of a conversation in the model's chat template."""
        return self._prompts.render(conversation)

    def locate(self, text: str, token_ids: Sequence[int] | TokenIds) -> tuple[int, int] | None:
        """Where a text is in a prompt: the first token that is its own and the one after its last.
        None if it is not there, or is tokenized differently there."""
        return self._prompts.locate(text, token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self.model.tokenizer.decode(token_ids)

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
        ``exactness="verified"`` gives the answer of a full prefill: it reads moved text again;
        ``heal`` overrides the engine's. ``speculate`` says whether tokens are drafted and checked
        several at a time, which changes no answer: ``"auto"``, ``"off"`` or the most tokens of a
        draft.

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
        context_management: Mapping[str, Any] | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult:
        """Answers a conversation in the model's own chat template. The roles of messages are
        system, developer, user, assistant, tool, and those that the template names.

        ``tools`` are in OpenAI's format. ``tool_choice`` is ``"auto"``, ``"none"``, ``"required"``
        or the name of a tool; the last two need the extra ``structured``. The result's
        ``tool_calls`` and ``content`` are the parts of the answer, ``output_text`` is all of it.
        ``template_options`` go to the template, such as ``{"enable_thinking": False}``.
        ``context_management`` clears old tool results and reasoning first; see ``applied_edits``.
        Like ``tools``, it is only here: :meth:`stream` and the others read messages as they are.
        """
        clock = Clock()
        if isinstance(messages, str):
            raise PromptError("chat() takes messages; give text to generate()")
        use = tool_use(tools, tool_choice)
        said = Conversation(messages, use.offered, template_options or {})
        said, applied = edit_context(said, context_management, lambda one: len(self.encode(one)))
        ids = (read := self.read(said)).token_ids.tolist()
        prepared: Any = self.answer_options(ids, use, options)
        state = self._requests.begin(read, max_new_tokens, mode, prepared, clock)
        result = replace(_whole(self._stream(state)), applied_edits=applied)
        return with_parts(result, self.answer_parser(ids, use))

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
        return self._stream(self._requests.begin(prompt, max_new_tokens, mode, options))

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
        state = self._requests.begin(prompt, max_new_tokens, mode, options)
        return self._loop.stream(state, timeout)

    def answer_to(
        self,
        listen: Callable[[RequestState], AnswerListener],
        prompt: Prompt | TokenIds,
        max_new_tokens: int,
        mode: GenerationMode | str,
        *,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Callable[[], None]:
        """Like :meth:`astream`, for a server whose HTTP is in another process: the loop's thread
        gives the token ids of the answer to the listener that ``listen`` makes, and no text is made
        of them here. Returns what cancels the request."""
        state = self._requests.begin(prompt, max_new_tokens, mode, options)
        state.shows_ids = True
        job = self._loop.submit(state, listen(state), timeout=timeout)
        return self._loop.canceller(job)

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
            started.append(self._requests.begin(prompt, tokens, how, merged))
        return self._loop.answer_all(started)

    def compile_format(self, options: Mapping[str, Any]) -> Grammar | None:
        """The grammar of the format in ``options`` (``schema``, ``regex``, ``grammar`` or
        ``choice``); None if there is none. Later requests with the same format find it compiled: a
        large schema takes up to a second, and the first grammar of an engine another one. Raises
        ``StructuredOutputError`` if answers cannot be held to the format."""
        return self._grammars.of_format(options)

    def prepare_formats(self) -> None:
        """Does now what the first format of an engine would wait for, about a second; nothing
        without the extra ``structured``. No other thread runs meanwhile, so a server does it before
        it takes requests."""
        if missing() is None:
            self._grammars.prepare()

    def answer_options(
        self, prompt_ids: Sequence[int], use: ToolUse, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The options of a chat request as those of :meth:`generate`: the format covers reasoning
        and calls of tools as well. Compiles it, see :meth:`compile_format`."""
        return answer_options(self.model.tokenizer, self._grammars, prompt_ids, use, options)

    def answer_parser(self, prompt_ids: Sequence[int], use: ToolUse) -> AnswerParser | None:
        """The parser that splits the answer to a chat request into content, reasoning and calls of
        tools; None if the answer can have content only."""
        return self.model.tokenizer.answer_parser(prompt_ids, use)

    def plan(
        self,
        prompt: Prompt,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        **options: Unpack[ReuseOptions],
    ) -> ReuseReport:
        """How a prompt would be served now; ``explain()`` of it says why. Runs nothing and counts
        nothing. The model decides which moved rows to recompute, so the plan does not name them."""
        read = self._prompts.read_whole(prompt)
        return self.runtime.plan(self._requests.plain(read, mode, options, runs=False))

    def trace(self, token_ids: Sequence[int], root: str, **options: Any) -> Traces:
        """The traces of a prompt in the cache, for explanations that another process makes; see
        ``ChunkStore.trace``."""
        return self.runtime.store.trace(as_token_ids(token_ids), ChunkKey(root), **options)

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
        if isinstance(continuation, str):
            raise PromptError("continuation is token ids, such as a result's token_ids")
        follow = self._prompts.read_text(continuation)
        read = self._prompts.read_whole(prompt)
        ids = as_token_ids(np.concatenate([read.token_ids, follow[:-1]]))
        request = self._requests.plain(replace(read, token_ids=ids), mode, options)
        clock.lap("tokenize")
        state = RequestState(request, clock)
        logits = Generation(self.runtime, state, len(follow)).score()
        return Score(logits, clock.timings(), state.reuse)

    def embed(self, texts: Sequence[str]) -> npt.NDArray[np.float32]:
        """Embeddings ``[texts, dimensions]`` by the loaded model: the mean of the last hidden
        states, normalised. Nothing is cached. :class:`EmbeddingModel` loads a model that was
        trained for this, which finds the right text more often."""
        self._lifetime.check()
        if isinstance(texts, str):
            raise PromptError("embed() takes several texts; give one in a list")
        return self.embedder.embed([self._prompts.read_text(text).tolist() for text in texts])

    @property
    def embedder(self) -> LoadedModelEmbedder:
        """Computes embeddings with the loaded model, slice by slice."""
        return LoadedModelEmbedder(self.runtime)

    def warm(
        self,
        text: Prompt | Sequence[str],
        position_offset: int = 0,
        header: str | None = None,
        *,
        cache_salt: str = "",
        adapter: str | None = None,
        contexts: int = 1,
        progress: bool = True,
    ) -> int:
        """Reads one document or several and keeps them; returns the number of new chunks.

        A text is read after ``header``. Without a header it is read as the beginning of a user's
        first message in the model's chat template; ``header=""`` reads it alone. It then serves
        anywhere in a prompt, and exactly if everything before it is the same too. Token ids and
        messages are read as they are. Only requests with the same ``adapter`` can use it.

        ``contexts`` says how often each of several documents is read: once after the header, then
        after the header and another of the documents. Text that was read in up to four contexts is
        closer to a full prefill where it is moved to. It takes that many times as long;
        :meth:`warm_later` does it in idle time.

        Reading several documents shows a progress bar if standard error is a terminal;
        ``progress=False`` hides it.
        """
        if position_offset != 0:
            raise ConfigError(
                f"position_offset={position_offset!r} is not needed: what is read serves at any "
                "position; to read it after other text, give that text as header"
            )
        return self._documents.warm(text, header, cache_salt, adapter, contexts, progress=progress)

    def warm_later(
        self,
        documents: Sequence[str],
        header: str | None = None,
        *,
        contexts: int = MOST_CONTEXTS,
        cache_salt: str = "",
        adapter: str | None = None,
    ) -> int:
        """Reads documents again in idle time, when nothing is to be healed: each after ``header``
        and another of the documents, ``contexts - 1`` times. Together with :meth:`warm`, which
        reads them after the header alone, that makes ``contexts``.

        Returns how many readings wait now. Two documents that do not fit the model's context
        together are left out. At most eight million tokens wait; a warning says so if more would.
        Readings are dropped once half of the cache's memory is taken: each takes as much as the
        document did, and must not push others out.

        The loop that batches, coroutines and a server use reads what waits; other engines do in
        :meth:`heal`. It is lost when the engine is closed or any text is forgotten."""
        return self._documents.warm_later(documents, header, contexts, cache_salt, adapter)

    async def awarm(
        self,
        text: Prompt,
        header: str | None = None,
        *,
        cache_salt: str = "",
        adapter: str | None = None,
    ) -> int:
        """Like :meth:`warm` of one text, for coroutines."""
        return await self._documents.awarm(text, header, cache_salt, adapter)

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
        return self._documents.arrange(header, documents, question, cache_salt)

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
        return self._documents.pin(text, header, ttl, cache_salt)

    async def apin(
        self,
        text: Prompt,
        header: str | None = None,
        *,
        ttl: float | None = None,
        cache_salt: str = "",
    ) -> Pin:
        """Like :meth:`pin`, for coroutines."""
        return await self._documents.apin(text, header, ttl, cache_salt)

    def unpin(self, text: Prompt, header: str | None = None, *, cache_salt: str = "") -> Pin | None:
        """Undoes :meth:`pin` of the same text; returns what was pinned, None if nothing was."""
        read, _ = self._documents.read(text, header)
        return self.drop_pin(pin_name(self.runtime.root(cache_salt), read.token_ids))

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
        self._lifetime.check()
        check_ttl(ttl)
        ids = self._prompts.read(prompt)
        adapters = self.runtime.adapters
        root = adapters.root(cache_salt, adapters.applied(adapter, ids))
        repair = self._settings.repair.name
        return self.runtime.store.pin(name, root, ids, repair=repair, ttl=ttl)

    def drop_pin(self, name: str) -> Pin | None:
        """Ends the pin of that name; returns what it was, None if there is none."""
        self._lifetime.check()
        return self.runtime.store.unpin(name)

    def pins(self) -> list[Pin]:
        """All pins with their sizes and the time that is left, those that end first first."""
        self._lifetime.check()
        return self.runtime.store.pins()

    def forget(self, text: Prompt) -> int:
        """Forgets a text on every tier, after any prefix and under any salt: every chunk that holds
        it (of a long text: 32 consecutive tokens of it), and every chunk that was computed after
        one of those. Requests that run at the same time are not kept. Returns the number of
        chunks. Raises ``ForgetError`` if some could not be removed. Other processes keep what they
        hold in memory."""
        self._lifetime.check()
        prompts = self._prompts
        ids = prompts.inside(text) if isinstance(text, str) else [prompts.read(text)]
        return self.runtime.store.forget_text(ids)

    def forget_salt(self, cache_salt: str) -> int:
        """Forgets everything that was read under ``cache_salt``, on every tier, with no adapter and
        with each that this engine has had; returns the number of chunks. Raises ``ForgetError`` if
        some could not be removed."""
        self._lifetime.check()
        runtime = self.runtime
        return runtime.store.forget(*runtime.adapters.roots_of_salt(cache_salt))

    def clear(self) -> None:
        """Forgets everything in memory and on disk. The remote store, which other machines share,
        keeps its chunks."""
        self._lifetime.check()
        self.runtime.store.clear()

    def reset_cache(self) -> None:
        """The name of :meth:`clear` in version 0.9."""
        self.clear()

    def flush(self) -> None:
        """Writes chunks that are only in memory to disk and to the remote store now."""
        self.runtime.store.flush()

    def heal(self, timeout: float | None = None) -> HealReport:
        """Computes the rows that requests have left approximate, exactly, and keeps them instead:
        the conversations are then what a full prefill would have left. Batches, coroutines and a
        server need not call it: their loop heals whenever it is idle. Then reads what
        :meth:`warm_later` has left. Ends after ``timeout`` seconds at the latest; requests of the
        loop go first."""
        self._lifetime.check()
        if timeout is not None:
            at_least(timeout, 0.0, "timeout")
        return self._healer.heal(timeout, self._loop.is_busy, self._loop.wait_idle)

    def chunks(self, limit: int = 20) -> list[dict[str, Any]]:
        """The most valuable chunks in memory: those that would be evicted last come first."""
        whole(limit, 1, "limit")
        found = self.runtime.store.most_valuable(limit)
        for chunk in found:
            chunk["text"] = self.decode(chunk.pop("token_ids")[:PREVIEW_TOKENS])
        return found

    def cache_stats(self) -> dict[str, Any]:
        """The contents of the cache in numbers, and totals of all requests. ``cache_hits`` are
        chunks that served rows, wholly or in part; ``cache_misses`` are the chunks that the
        computed rows would fill. ``healing``: approximate rows and what became of them; ``audit``:
        how far answers over moved text were from exact ones."""
        return {
            **self.runtime.stats(),
            "healing": self._healer.stats(),
            "audit": {
                **self._healer.audit_stats(),
                "recompute_ratio": self._settings.config.recompute_ratio,
            },
        }

    def check_integrity(self) -> list[str]:
        """Inconsistencies in the cache's own records, across all tiers; empty if there are none. On
        a GPU also pages that are held although no request runs."""
        return self.runtime.check_integrity()

    def load_adapter(
        self, name: str, path: str | os.PathLike[str], *, in_place: bool = False
    ) -> AdapterInfo:
        """Loads the LoRA adapter in the folder ``path``, as PEFT writes it, while requests run.
        Requests name it with ``adapter=name``; one batch may hold any number of adapters.
        ``in_place`` replaces the one of that name. AdapterError: it does not fit the model."""
        self._lifetime.check()
        return self.runtime.adapters.load(name, path, in_place=in_place)

    def unload_adapter(self, name: str) -> AdapterInfo:
        """Takes an adapter away. Requests that run finish with it. What is cached of it leaves the
        memory, and stays on disk for when the same adapter is loaded again, under any name."""
        self._lifetime.check()
        return self.runtime.adapters.unload(name)

    def adapters(self) -> dict[str, AdapterInfo]:
        """The loaded adapters, by name."""
        return self.runtime.adapters.infos()

    def calibrate(
        self, samples: Sequence[Prompt], max_kl: float, *, cache_salt: str = ""
    ) -> Calibration:
        """Finds how little of moved text may be recomputed so that the answers to ``samples`` stay
        within ``max_kl`` of a full prefill, and uses that ratio from now on; give it to later
        engines as ``recompute_ratio``. Read the documents of the samples first, with :meth:`warm`
        or in other requests."""
        found = calibrate(self, samples, max_kl, self.config.repair, cache_salt)
        self._settings.use(found)
        return found

    def rehearse(self) -> float:
        """Answers made-up prompts of many sizes, as many at once as may run, and forgets them;
        returns the seconds it took. On a GPU, later requests then wait for no CUDA graph to be
        recorded. ``kvboost serve`` does it when it starts."""
        began = time.monotonic()
        rehearse(self, self.config.max_running)
        self.runtime.backend.record_missing()
        return time.monotonic() - began

    def verify_correctness(self, max_new_tokens: int = 32) -> VerificationReport:
        """Answers built-in prompts with and without reuse and compares the answers. The report is
        truthy only if most prompt tokens were reused and the answers agree."""
        return verify(self, max_new_tokens)

    def serving_stats(self) -> dict[str, Any]:
        """The requests of batches, coroutines and the server: how many wait and run, their KV, and
        totals."""
        return self._loop.stats()

    def estimate_ms(self, num_tokens: int) -> float | None:
        """How long reading ``num_tokens`` would take without reuse; None until it was measured."""
        estimate = self.runtime.estimate_ms(num_tokens)
        return None if estimate is None else round(estimate, 3)

    def between_steps(self, work: Callable[[], T]) -> Future[T]:
        """Runs ``work`` in the thread that computes answers, between two of its steps: for short
        pieces of other work on the same device, such as embeddings. Answers wait for each."""
        self._lifetime.check()
        return self._loop.between_steps(work)

    def answer_meanwhile(self) -> None:
        """Lets answers that have waited for long go on. To be called by work in ``between_steps``
        every now and then, if it takes longer than ``max_pause``."""
        self._loop.answer_meanwhile()

    async def adrain(self, timeout: float | None = None) -> bool:
        """Takes no new requests and waits for the others to end; False if that took longer than
        ``timeout`` seconds."""
        return await asyncio.to_thread(self._loop.drain, timeout)

    def close(self) -> None:
        """Cancels running requests, closes the cache and restores the model's own attention. In a
        forked child it does nothing: the engine belongs to the parent."""
        if self._lifetime.is_elsewhere:
            return
        self._loop.close()
        self._healer.close()
        self._lifetime.is_over = True
        self.runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return describe(self.model, self.config, is_closed=self._lifetime.is_over)

    def _stream(self, state: RequestState) -> TextStream:
        steps = Generation(self.runtime, state).steps()
        return TextStream(text_pieces(self.runtime.backend, steps, state), state)


def _whole(stream: TextStream) -> GenerationResult:
    for _ in stream:
        pass
    return stream.result
