"""Texts that are read and kept without an answer, arranged and pinned."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Sequence
from typing import TypeGuard, cast

from kvboost.config import MOST_CONTEXTS, at_least, whole
from kvboost.errors import ConfigError, PinError, PromptError
from kvboost.progress import Progress
from kvboost.results import Arrangement, Pin
from kvboost.reuse.arrange import arrange
from kvboost.runtime.generation import Generation
from kvboost.runtime.loop import Loop
from kvboost.runtime.requests import Requests
from kvboost.runtime.runtime import Runtime
from kvboost.tokens.hashing import TokenIds, pin_name
from kvboost.tokens.images import ReadPrompt
from kvboost.tokens.prompt import Prompt, PromptReader

log = logging.getLogger("kvboost")

Text = tuple[ReadPrompt, Sequence[int]]
"""A text as token ids, and its boundary if documents are cut on their own."""


class Documents:
    """Those of an engine. Thread-safe."""

    def __init__(
        self,
        runtime: Runtime,
        prompts: PromptReader,
        requests: Requests,
        loop: Loop,
        *,
        are_cut: bool,
    ) -> None:
        """``are_cut``: whether no chunk crosses the beginning of a document."""
        self._runtime, self._prompts, self._requests, self._loop = runtime, prompts, requests, loop
        self._are_cut = are_cut

    def read(self, text: Prompt, header: str | None) -> Text:
        """A text after ``header``, as :meth:`warm` reads it."""
        if isinstance(text, str):
            ids, start = self._prompts.read_document(text, header)
            return ReadPrompt(ids), (start,) if self._are_cut else ()
        if header is not None:
            raise PromptError("header= goes with text given as a string or several")
        return self._prompts.read_whole(text), ()

    def warm(
        self,
        text: Prompt | Sequence[str],
        header: str | None,
        salt: str,
        adapter: str | None,
        contexts: int,
        *,
        progress: bool,
    ) -> int:
        """See ``KVBoost.warm``."""
        whole(contexts, 1, "contexts")
        if not _are_documents(text):
            if contexts > 1:
                raise ConfigError(
                    f"contexts={contexts} goes with a list of documents: each is read after others"
                )
            return self._warm(self.read(cast(Prompt, text), header), salt, adapter)
        with (
            Progress("reading documents", only_on_terminal=True, show=progress) as shown,
            shown.step("read", len(text) * min(contexts, len(text))) as step,
        ):
            new = 0
            for context in range(min(contexts, len(text))):
                for number, document in enumerate(text):
                    before = text[(number + context) % len(text)] if context else ""
                    new += self._warm(self.read(before + document, header), salt, adapter)
                    step.advance()
            return new

    async def awarm(
        self, text: Prompt, header: str | None, salt: str, adapter: str | None = None
    ) -> int:
        """See ``KVBoost.awarm``."""
        return await self._awarm(await asyncio.to_thread(self.read, text, header), salt, adapter)

    def warm_later(
        self,
        documents: Sequence[str],
        header: str | None,
        contexts: int,
        salt: str,
        adapter: str | None,
    ) -> int:
        """See ``KVBoost.warm_later``."""
        if not _are_documents(documents) or len(documents) < 2:
            raise PromptError(f"documents={documents!r} must be a list of at least two strings")
        whole(contexts, 2, "contexts")
        if contexts > MOST_CONTEXTS:
            raise ConfigError(
                f"contexts={contexts} must be at most {MOST_CONTEXTS}: more copies are not mixed"
            )
        queue, epoch = self._runtime.idle_work, self._runtime.store.epoch
        longest = self._runtime.model.context_length or sys.maxsize
        lengths = [len(self.read(one, header)[0].token_ids) for one in documents]
        pairs = [
            ((number + context) % len(documents), number)
            for context in range(1, min(contexts, len(documents)))
            for number in range(len(documents))
        ]
        pairs = [pair for pair in pairs if lengths[pair[0]] + lengths[pair[1]] < longest]
        for waiting, (before, number) in enumerate(pairs):
            read, boundaries = self.read(documents[before] + documents[number], header)
            request = self._requests.reading(read, salt, boundaries, adapter).request
            if not queue.add_reading(request, epoch):
                log.warning(
                    "%d of %d readings wait; there is no room for more", waiting, len(pairs)
                )
                return waiting
        return len(pairs)

    def arrange(
        self, header: str | None, documents: Sequence[str], question: str, salt: str
    ) -> Arrangement:
        """See ``KVBoost.arrange``."""
        if isinstance(documents, str) or not documents:
            raise PromptError(f"documents={documents!r} must be several strings")
        before, after = self._prompts.frame(header, question)
        return arrange(
            before,
            [self._prompts.join(text) for text in documents],
            after,
            lambda ids: self._runtime.known_exactly(ids, salt),
        )

    def pin(self, text: Prompt, header: str | None, ttl: float | None, salt: str) -> Pin:
        """See ``KVBoost.pin``."""
        check_ttl(ttl)
        read = self.read(text, header)
        self._warm(read, salt)
        return self._pin(read[0].token_ids, ttl, salt)

    async def apin(self, text: Prompt, header: str | None, ttl: float | None, salt: str) -> Pin:
        """See ``KVBoost.apin``."""
        check_ttl(ttl)
        read = await asyncio.to_thread(self.read, text, header)
        await self._awarm(read, salt)
        return self._pin(read[0].token_ids, ttl, salt)

    def _warm(self, text: Text, salt: str, adapter: str | None = None) -> int:
        read, boundaries = text
        state = self._requests.reading(read, salt, boundaries, adapter)
        return Generation(self._runtime, state).read()

    async def _awarm(self, text: Text, salt: str, adapter: str | None = None) -> int:
        read, boundaries = text
        state = self._requests.reading(read, salt, boundaries, adapter)
        async with self._loop.stream(state) as stream:
            async for _ in stream:
                pass
        return stream.new_chunks

    def _pin(self, token_ids: TokenIds, ttl: float | None, salt: str) -> Pin:
        store, root = self._runtime.store, self._runtime.root(salt)
        name = pin_name(root, token_ids)
        pin = store.pin(name, root, token_ids, ttl=ttl)
        if pin.tokens < len(token_ids):
            store.unpin(name)
            raise PinError(
                f"only {pin.tokens:,} of {len(token_ids):,} tokens are in the cache after reading "
                "them, so they cannot be pinned; raise max_cache_bytes"
            )
        return pin


def check_ttl(ttl: float | None) -> None:
    """Raises ConfigError unless ``ttl`` is a number of seconds, or none."""
    if ttl is not None:
        at_least(ttl, 0.0, "ttl")


def _are_documents(text: object) -> TypeGuard[Sequence[str]]:
    return (
        isinstance(text, Sequence)
        and not isinstance(text, str)
        and bool(text)
        and all(isinstance(one, str) for one in text)
    )
