"""The texts that an engine has read, and what its user does with them."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard, cast

from kvboost.config import MOST_CONTEXTS, EngineConfig, GenerationMode, at_least, whole
from kvboost.errors import ConfigError, PinError, PromptError
from kvboost.model.loading.load import LoadedModel
from kvboost.model.loading.tokenizer import ModelTokenizer
from kvboost.progress import Progress
from kvboost.results import Arrangement, HealReport, Pin, ReuseReport
from kvboost.results.explaining import Traces
from kvboost.reuse.arrange import arrange
from kvboost.runtime.generation import Generation
from kvboost.runtime.healing import Healer
from kvboost.runtime.lifetime import Lifetime
from kvboost.runtime.loop import Loop
from kvboost.runtime.options import ReuseOptions
from kvboost.runtime.request import RequestState
from kvboost.runtime.requests import Requests
from kvboost.runtime.runtime import Runtime
from kvboost.runtime.settings import Settings
from kvboost.runtime.streams import AsyncTextStream
from kvboost.structured.grammars import Grammars
from kvboost.tokens.hashing import ChunkKey, TokenIds, as_token_ids, pin_name
from kvboost.tokens.images import ImageReader, ReadPrompt
from kvboost.tokens.prompt import Conversation, Prompt, PromptReader

if TYPE_CHECKING:
    from typing import Self

    from typing_extensions import Unpack

log = logging.getLogger("kvboost")

PREVIEW_TOKENS = 48


class TextCache:
    """What an engine does with texts apart from answering: it reads, finds, pins, heals and forgets
    them. Thread-safe."""

    def __init__(self, model: LoadedModel, config: EngineConfig, runtime: Runtime) -> None:
        self._model = model
        self._runtime = runtime
        self._settings = Settings(config, runtime.cost)
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

    @property
    def prompt_tokenizer(self) -> ModelTokenizer:
        """What requests use of the tokenizer, with the model's chat template. It can be pickled, so
        that another process reads prompts and writes answers just as this one."""
        return self._model.tokenizer

    @property
    def eos_ids(self) -> frozenset[int]:
        """The tokens that end an answer."""
        return self._model.eos_ids

    def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a prompt. ``add_special_tokens=False`` takes text as it is, without the
        tokens that the model expects in front: for text of :meth:`render`, which has them."""
        if isinstance(prompt, str) and not add_special_tokens:
            return self._model.tokenizer.encode_fragment(prompt)
        ids: list[int] = self._prompts.read(prompt).tolist()
        return ids

    def read(self, prompt: Prompt) -> ReadPrompt:
        """The token ids of a prompt and its images, which can be given instead of the prompt. The
        rows of images have ids of their own, outside the vocabulary."""
        return self._prompts.read_whole(prompt)

    @property
    def image_reader(self) -> ImageReader | str:
        """What reads images for the model; why it takes none, if it does not. It can be pickled."""
        return self._images

    def infill(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The token ids of a prompt whose answer stands between two texts, given theirs. Raises
        PromptError if the model cannot fill in the middle."""
        return self._model.tokenizer.infill(before, after)

    def render(self, conversation: Conversation) -> str:
        """The text of a conversation in the model's chat template."""
        return self._prompts.render(conversation)

    def locate(self, text: str, token_ids: Sequence[int]) -> tuple[int, int] | None:
        """Where a text is in a prompt: the first token that is its own and the one after its last.
        None if it is not there, or is tokenized differently there."""
        return self._prompts.locate(text, token_ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, without special tokens."""
        return self._model.tokenizer.decode(token_ids)

    def plan(
        self,
        prompt: Prompt,
        mode: GenerationMode | str = GenerationMode.CHUNK_KV_REUSE,
        **options: Unpack[ReuseOptions],
    ) -> ReuseReport:
        """How a prompt would be served now; ``explain()`` of it says why. Runs nothing and counts
        nothing. The model decides which moved rows to recompute, so the plan does not name them."""
        read = self._prompts.read_whole(prompt)
        return self._runtime.plan(self._requests.planned(read, mode, options))

    def trace(self, token_ids: Sequence[int], root: str, **options: Any) -> Traces:
        """What the cache still tells of a prompt, for explanations that another process makes; see
        ``ChunkStore.trace``."""
        return self._runtime.store.trace(as_token_ids(token_ids), ChunkKey(root), **options)

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
        whole(contexts, 1, "contexts")
        if not _is_documents(text):
            if contexts > 1:
                raise ConfigError(
                    f"contexts={contexts} goes with a list of documents: each is read after others"
                )
            read, boundaries = self._read_one(cast(Prompt, text), header)
            return self._warm(read, cache_salt, boundaries, adapter)
        with (
            Progress("reading documents", only_on_terminal=True, show=progress) as shown,
            shown.step("read", len(text) * min(contexts, len(text))) as step,
        ):
            new = 0
            for context in range(min(contexts, len(text))):
                for number, document in enumerate(text):
                    before = text[(number + context) % len(text)] if context else ""
                    read, boundaries = self._read_one(before + document, header)
                    new += self._warm(read, cache_salt, boundaries, adapter)
                    step.advance()
            return new

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
        reads them after the header alone, that makes ``contexts``. Text that was read in up to four
        contexts is closer to a full prefill where it is moved to.

        Returns how many readings wait now. Two documents that do not fit the model's context
        together are left out. At most eight million tokens wait; a warning says so if more would.
        Readings are dropped once half of the cache's memory is taken: each takes as much as the
        document did, and must not push others out.

        The loop that batches, coroutines and a server use reads what waits; other engines do in
        :meth:`heal`. It is lost when the engine is closed or any text is forgotten."""
        if not _is_documents(documents) or len(documents) < 2:
            raise PromptError(f"documents={documents!r} must be a list of at least two strings")
        whole(contexts, 2, "contexts")
        if contexts > MOST_CONTEXTS:
            raise ConfigError(
                f"contexts={contexts} must be at most {MOST_CONTEXTS}: more copies are not mixed"
            )
        queue, epoch = self._runtime.idle_work, self._runtime.store.epoch
        longest = self._runtime.model.context_length or sys.maxsize
        lengths = [len(self._read_one(one, header)[0].token_ids) for one in documents]
        pairs = [
            ((number + context) % len(documents), number)
            for context in range(1, min(contexts, len(documents)))
            for number in range(len(documents))
        ]
        pairs = [pair for pair in pairs if lengths[pair[0]] + lengths[pair[1]] < longest]
        for waiting, (before, number) in enumerate(pairs):
            read, boundaries = self._read_one(documents[before] + documents[number], header)
            request = self._requests.reading(read, cache_salt, boundaries, adapter).request
            if not queue.add_reading(request, epoch):
                log.warning(
                    "%d of %d readings wait; there is no room for more", waiting, len(pairs)
                )
                return waiting
        return len(pairs)

    async def awarm(
        self,
        text: Prompt,
        header: str | None = None,
        *,
        cache_salt: str = "",
        adapter: str | None = None,
    ) -> int:
        """Like :meth:`warm` of one text, for coroutines."""
        read, boundaries = await asyncio.to_thread(self._read_one, text, header)
        return await self._awarm(read, cache_salt, boundaries, adapter)

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
        read, boundaries = self._read_one(text, header)
        _check_ttl(ttl)
        self._warm(read, cache_salt, boundaries)
        return self._pin_all(read.token_ids, ttl, cache_salt)

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
        read, boundaries = await asyncio.to_thread(self._read_one, text, header)
        await self._awarm(read, cache_salt, boundaries)
        return self._pin_all(read.token_ids, ttl, cache_salt)

    def unpin(self, text: Prompt, header: str | None = None, *, cache_salt: str = "") -> Pin | None:
        """Undoes :meth:`pin` of the same text; returns what was pinned, None if nothing was."""
        read, _ = self._read_one(text, header)
        return self.drop_pin(pin_name(self._runtime.root(cache_salt), read.token_ids))

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
        _check_ttl(ttl)
        ids = self._prompts.read(prompt)
        adapters = self._runtime.adapters
        root = adapters.root(cache_salt, adapters.applied(adapter, ids))
        repair = self._settings.repair.name
        return self._runtime.store.pin(name, root, ids, repair=repair, ttl=ttl)

    def drop_pin(self, name: str) -> Pin | None:
        """Ends the pin of that name; returns what it was, None if there is none."""
        self._lifetime.check()
        return self._runtime.store.unpin(name)

    def pins(self) -> list[Pin]:
        """All pins with their sizes and the time that is left, those that end first first."""
        self._lifetime.check()
        return self._runtime.store.pins()

    def forget(self, text: Prompt) -> int:
        """Forgets a text on every tier, after any prefix and under any salt: every chunk that holds
        it (of a long text: 32 consecutive tokens of it), and every chunk that was computed after
        one of those. Requests that run at the same time are not kept. Returns the number of
        chunks. Raises ``ForgetError`` if some could not be removed. Other processes keep what they
        hold in memory."""
        self._lifetime.check()
        ids = (
            [self._prompts.read(text)] if not isinstance(text, str) else self._prompts.inside(text)
        )
        return self._runtime.store.forget_text(ids)

    def forget_salt(self, cache_salt: str) -> int:
        """Forgets everything that was read under ``cache_salt``, on every tier, with no adapter and
        with each that this engine has had; returns the number of chunks. Raises ``ForgetError`` if
        some could not be removed."""
        self._lifetime.check()
        runtime = self._runtime
        return runtime.store.forget(*runtime.adapters.roots_of_salt(cache_salt))

    def clear(self) -> None:
        """Forgets everything in memory and on disk. The remote store, which other machines share,
        keeps its chunks."""
        self._lifetime.check()
        self._runtime.store.clear()

    def reset_cache(self) -> None:
        """The name of :meth:`clear` in version 0.9."""
        self.clear()

    def flush(self) -> None:
        """Writes chunks that are only in memory to disk and to the remote store now."""
        self._runtime.store.flush()

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
        found = self._runtime.store.most_valuable(limit)
        for chunk in found:
            chunk["text"] = self.decode(chunk.pop("token_ids")[:PREVIEW_TOKENS])
        return found

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
                "recompute_ratio": self._settings.config.recompute_ratio,
            },
        }

    def check_integrity(self) -> list[str]:
        """Inconsistencies in the cache's own records, across all tiers; empty if there are none. On
        a GPU also pages that are held although no request runs."""
        return self._runtime.check_integrity()

    def close(self) -> None:
        """Cancels running requests, closes the cache and restores the model's own attention. In a
        forked child it does nothing: the engine belongs to the parent."""
        if self._lifetime.is_elsewhere:
            return
        self._loop.close()
        self._healer.close()
        self._lifetime.is_over = True
        self._runtime.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _submit(self, state: RequestState, timeout: float | None) -> AsyncTextStream:
        stream = AsyncTextStream(state)
        job = self._loop.submit(state, stream, timeout=timeout)
        stream.on_close(lambda: self._loop.cancel(job))
        return stream

    def _read_one(self, text: Prompt, header: str | None) -> tuple[ReadPrompt, Sequence[int]]:
        """One text to warm, and its boundary if documents are cut on their own."""
        if isinstance(text, str):
            ids, start = self._prompts.read_document(text, header)
            return ReadPrompt(ids), (start,) if self._settings.config.chunking == "document" else ()
        if header is not None:
            raise PromptError("header= goes with text given as a string or several")
        return self._prompts.read_whole(text), ()

    def _warm(
        self,
        prompt: ReadPrompt,
        salt: str,
        boundaries: Sequence[int] = (),
        adapter: str | None = None,
    ) -> int:
        state = self._requests.reading(prompt, salt, boundaries, adapter)
        return Generation(self._runtime, state).read()

    async def _awarm(
        self,
        prompt: ReadPrompt,
        salt: str,
        boundaries: Sequence[int],
        adapter: str | None = None,
    ) -> int:
        state = self._requests.reading(prompt, salt, boundaries, adapter)
        async with self._submit(state, None) as stream:
            async for _ in stream:
                pass
        return stream.new_chunks

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


def _check_ttl(ttl: float | None) -> None:
    if ttl is not None:
        at_least(ttl, 0.0, "ttl")


def _is_documents(text: object) -> TypeGuard[Sequence[str]]:
    return (
        isinstance(text, Sequence)
        and not isinstance(text, str)
        and bool(text)
        and all(isinstance(one, str) for one in text)
    )
