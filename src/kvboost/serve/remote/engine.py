"""The engine as an API process sees it: what concerns text is done here, all else is a call."""

from __future__ import annotations

import pickle
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import numpy as np

from kvboost.chat.answer_options import answer_options
from kvboost.chat.parser import AnswerParser
from kvboost.chat.tool_use import ToolUse
from kvboost.errors import StructuredOutputError
from kvboost.results import AdapterInfo, Explanation, Healing, Pin, ReuseReport
from kvboost.results.explaining import Traces, explain
from kvboost.serve.embedder import Vectors
from kvboost.serve.live import KEPT_HEALING
from kvboost.serve.remote import wire
from kvboost.serve.remote.answers import RemoteState, RemoteStream, text_of
from kvboost.serve.remote.link import Link
from kvboost.structured.formats import grammar_for
from kvboost.tokens.hashing import TokenIds
from kvboost.tokens.images import ImageReader, ReadPrompt
from kvboost.tokens.prompt import Conversation, Prompt, PromptReader

T = TypeVar("T")

_KEPT_ESTIMATES = 1024


class RemoteGrammars:
    """Formats of answers. Their grammars are compiled where answers are computed, and once."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def compile(self, grammar: str, option: str = "grammar") -> str:
        """The grammar itself, which the engine has compiled then. For a thread."""
        try:
            self._link.call("compile_format", {"grammar": grammar})
        except StructuredOutputError as error:
            raise StructuredOutputError(option, error.reason) from None
        return grammar


_METHODS: dict[str, Any] = {
    **dict.fromkeys(("warm_later", "forget", "forget_salt"), int),
    **dict.fromkeys(("unpin", "drop_pin"), Pin | None),
    "pin_cached": Pin,
    "pins": list[Pin],
    "chunks": list[dict[str, Any]],
    "serving_stats": dict[str, Any],
    "load_adapter": AdapterInfo,
    "unload_adapter": AdapterInfo,
}
_COROUTINES: dict[str, Any] = {"awarm": int, "apin": Pin}
"""Methods of the engine's that are calls, and the types of their results."""


class RemoteEngine:
    """Has the methods of KVBoost that the server uses."""

    def __init__(self, link: Link, about: wire.EngineDescription) -> None:
        self._link = link
        self._about = about
        self.model_name = about.model_name
        self.context_length = about.context_length
        self.vocab_size = about.vocab_size
        self.config = about.config
        self.failure: Exception | None = None
        self.embedder = RemoteEncoder(link, about.dimensions)
        self._tokenizer: Any = pickle.loads(about.tokenizer)
        self.image_reader: ImageReader | str = pickle.loads(about.image_reader)
        self._prompts = PromptReader(
            self._tokenizer, about.vocab_size, self.image_reader, about.config.image_limits
        )
        self._grammars = RemoteGrammars(link)
        self._adapters = about.adapters
        self._estimates: OrderedDict[int, float | None] = OrderedDict()
        """By the length of a prompt: those of the last answers."""
        self._states: WeakValueDictionary[int, RemoteState] = WeakValueDictionary()
        """How far answers are, by number."""
        self._healing: deque[tuple[int, Healing]] = deque(maxlen=KEPT_HEALING)
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="kvboost-embeddings")
        for name, kind in _METHODS.items():
            setattr(self, name, partial(link.call, name, returns=kind))
        for name, kind in _COROUTINES.items():
            setattr(self, name, partial(link.acall, name, returns=kind))
        link.on_adapters = self._take_adapters
        link.on_failed = self._fail

    def _take_adapters(self, message: wire.Adapters) -> None:
        self._adapters = message.adapters

    def _fail(self, error: Exception) -> None:
        self.failure = error

    def facts(self) -> dict[str, Any]:
        return self._about.facts

    # Text: in this process.

    def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> list[int]:
        if isinstance(prompt, str) and not add_special_tokens:
            found = self._prompts.join(prompt)
        else:
            found = self._prompts.read(prompt)
        ids: list[int] = found.tolist()
        return ids

    def read(self, prompt: Prompt, *, add_special_tokens: bool = True) -> ReadPrompt:
        return self._prompts.read_whole(prompt, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(token_ids))

    def infill(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        ids: list[int] = self._tokenizer.infill(before, after)
        return ids

    def render(self, conversation: Conversation) -> str:
        return self._prompts.render(conversation)

    def locate(self, text: str, token_ids: Sequence[int] | TokenIds) -> tuple[int, int] | None:
        return self._prompts.locate(text, token_ids)

    def answer_parser(self, prompt_ids: Sequence[int], use: ToolUse) -> AnswerParser | None:
        parser: AnswerParser | None = self._tokenizer.answer_parser(prompt_ids, use)
        return parser

    def answer_options(
        self, prompt_ids: Sequence[int], use: ToolUse, options: Mapping[str, Any]
    ) -> dict[str, Any]:
        return answer_options(self._tokenizer, self._grammars, prompt_ids, use, options)

    def compile_format(self, options: Mapping[str, Any]) -> str | None:
        found = grammar_for(options)
        return None if found is None else self._grammars.compile(*found)

    # Answers.

    def astream(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        mode: str,
        *,
        timeout: float | None = None,
        **options: Any,
    ) -> RemoteStream:
        read = self._prompts.read_whole(prompt)
        ids, images = read.token_ids, read.images
        placed = None if images is None else (images.placed, images.row_id)
        text = text_of(self._tokenizer, self._about.eos_ids, options)
        state = RemoteState(text, options, self._explainer(ids))

        def on_news(news: wire.News) -> None:
            self._note(len(ids), news)

        stream = RemoteStream(state, on_news)
        number = self._link.ask(
            stream,
            lambda number: wire.Ask(
                *(number, ids.tobytes(), max_new_tokens, mode, timeout, options, placed)
            ),
        )
        self._states[number] = state
        stream.on_close(lambda: self._link.send(wire.Cancel(number)))
        return stream

    def _explainer(self, ids: TokenIds) -> Callable[[ReuseReport, bool], Explanation]:
        """A function that explains a report on a prompt in this process, from traces that the
        engine's process sends."""

        def work(report: ReuseReport, other_salts: bool) -> Explanation:
            def trace(root: str, **options: Any) -> Traces:
                found: Traces = self._link.call("trace", given, root, returns=Traces, **options)
                return found

            given: list[int] = ids.tolist()
            return explain(report, given, self.decode, trace, other_salts=other_salts)

        return work

    def _note(self, num_tokens: int, news: wire.News) -> None:
        if news.begun is not None:
            self._keep_estimate(num_tokens, news.begun.estimated_ms)
        if news.ended is not None:
            self._keep_estimate(num_tokens, news.ended.estimated_ms)
            if news.ended.healing is not None:
                self._healing.append((news.number, news.ended.healing))

    def _keep_estimate(self, num_tokens: int, estimate: float | None) -> None:
        self._estimates[num_tokens] = estimate
        self._estimates.move_to_end(num_tokens)
        if len(self._estimates) > _KEPT_ESTIMATES:
            self._estimates.popitem(last=False)

    def estimate_ms(self, num_tokens: int) -> float | None:
        """As of the last answer to a prompt of that length: the engine sends it along."""
        if num_tokens not in self._estimates:
            self._keep_estimate(num_tokens, self._link.call("estimate_ms", num_tokens))
        return self._estimates[num_tokens]

    # The cache, and adapters: calls, most of them in ``_METHODS``.

    def adapters(self) -> dict[str, AdapterInfo]:
        return self._adapters

    def plan(self, prompt: Prompt, mode: str, **options: Any) -> ReuseReport:
        plan: ReuseReport = self._link.call("plan", prompt, mode, returns=ReuseReport, **options)
        return replace(plan, explainer=self._explainer(self._prompts.read(prompt)))

    def cache_stats(self) -> dict[str, Any]:
        """Also brings up to date how far prompts are read and approximate rows are healed: the page
        shows all of this together."""
        self._take_progress(self._link.call("progress", returns=Progress))
        stats: dict[str, Any] = self._link.call("cache_stats")
        return stats

    def _take_progress(self, progress: Progress) -> None:
        for number, rows, reuse, estimate in progress.reading:
            if (state := self._states.get(number)) is not None and not state.token_ids:
                state.rows, state.reuse = rows, reuse
                self._keep_estimate(reuse.prompt_tokens, estimate)
        known = dict(self._healing)
        for number, healing in progress.healing:
            if number in known:
                vars(known[number]).update(vars(healing))

    # Embeddings: each slice is a call.

    def between_steps(self, work: Callable[[], T]) -> Future[T]:
        return self._threads.submit(work)

    def answer_meanwhile(self) -> None:
        """The engine's own process sees to it."""

    # The end: the engine's process waits for this one, and flushes the cache.

    async def adrain(self, timeout: float | None = None) -> bool:
        return True

    def flush(self) -> None:
        pass


@dataclass(frozen=True)
class Progress:
    """How far answers are: of those without a first token, their rows and where these come from;
    of those that have ended, what became of their approximate rows."""

    reading: list[tuple[int, int, ReuseReport, float | None]]
    healing: list[tuple[int, Healing]]


class RemoteEncoder:
    """Computes embeddings in the engine's process."""

    def __init__(self, link: Link, dimensions: int) -> None:
        self._link = link
        self.dimensions = dimensions
        self._begun = 0

    def steps(self, batch: Sequence[Sequence[int]]) -> Generator[None, None, Vectors]:
        """Each ``next`` computes a slice. For a thread."""
        self._begun += 1
        number, given = self._begun, [list(ids) for ids in batch]
        found = None
        try:
            found = self._link.call("embed", number, given)
            while found is None:
                yield
                found = self._link.call("embed", number, None)
        finally:
            if found is None:
                self._link.post("end_embedding", number)
        rows, columns, data = found
        return np.frombuffer(data, "<f4").astype(np.float32).reshape(rows, columns)


class RemoteEmbeddingModel(RemoteEncoder):
    """A model for embeddings in the engine's process."""

    def __init__(self, link: Link, about: wire.EmbeddingDescription) -> None:
        super().__init__(link, about.dimensions)
        self.name = about.name
        self.max_tokens = about.max_tokens
        self.vocab_size = about.vocab_size
        self._tokenizer = about.tokenizer
        self.between_parts: Callable[[], None] = lambda: None

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, truncation=False, verbose=False)["input_ids"]
        return ids
