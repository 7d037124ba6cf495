"""What callers ask for, checked: the requests of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvboost.config import GenerationMode, SamplingParams, within
from kvboost.errors import ContextLengthError
from kvboost.results import Clock
from kvboost.runtime.lifetime import Lifetime
from kvboost.runtime.options import (
    RequestOptions,
    ReuseOptions,
    make_request,
    refuse_unknown,
    split,
)
from kvboost.runtime.request import Request, RequestState
from kvboost.runtime.runtime import Runtime
from kvboost.runtime.settings import Settings
from kvboost.structured.grammars import Grammar, Grammars
from kvboost.tokens.hashing import TokenIds
from kvboost.tokens.prompt import Prompt, PromptReader


class Requests:
    """Makes them. What a request does not choose is taken from ``settings``. Thread-safe."""

    def __init__(
        self,
        runtime: Runtime,
        prompts: PromptReader,
        grammars: Grammars,
        settings: Settings,
        lifetime: Lifetime,
    ) -> None:
        self._runtime = runtime
        self._prompts = prompts
        self._grammars = grammars
        self._settings = settings
        self._lifetime = lifetime

    def begin(
        self,
        prompt: Prompt | TokenIds,
        max_new_tokens: int,
        mode: GenerationMode | str,
        options: RequestOptions,
        clock: Clock | None = None,
    ) -> RequestState:
        """A request for an answer. Its clock starts here, unless the caller has started it."""
        clock = clock or Clock()
        params, reuse = split(max_new_tokens, options)
        params = self._resolve(params)
        ids = self._prompts.read(prompt)
        grammar = self._grammars.of_format(options)
        request = self._make(
            ids,
            mode,
            reuse,
            params,
            grammar,
            keep=options.get("keep", True),
            boundaries=options.get("boundaries", ()),
            tenant=options.get("tenant", ""),
            heal=options.get("heal"),
            exactness=options.get("exactness", "repaired"),
            speculate=options.get("speculate"),
        )
        clock.lap("tokenize")
        return RequestState(request, clock)

    def _resolve(self, params: SamplingParams) -> SamplingParams:
        """``params`` with what depends on the model: token ids that it has, and those of words."""
        model = self._runtime.model
        for option in ("logit_bias", "stop_token_ids", "allowed_token_ids"):
            for token in getattr(params, option) or ():
                within(token, 0, model.vocab_size - 1, f"{option}: a token id")
        if not params.rules_out:
            return params
        ways = [f"{before}{word}" for word in params.bad_words for before in ("", " ")]
        banned = {tuple(model.tokenizer.encode_fragment(way)) for way in ways} - {()}
        ends = () if params.ignore_eos else model.eos_ids
        return replace(params, end_ids=tuple(sorted(ends)), bad_word_ids=tuple(sorted(banned)))

    def plain(
        self, token_ids: TokenIds, mode: GenerationMode | str, options: ReuseOptions
    ) -> Request:
        """A request whose answer does not matter. Unknown options are an error."""
        refuse_unknown(options, set(ReuseOptions.__annotations__))
        return self._make(token_ids, mode, options)

    def reading(
        self, token_ids: TokenIds, salt: str, boundaries: Sequence[int], adapter: str | None
    ) -> RequestState:
        """A request that reads a text and answers nothing."""
        options: ReuseOptions = {"cache_salt": salt, "adapter": adapter}
        mode = GenerationMode.PREFIX_CACHE
        request = self._make(token_ids, mode, options, boundaries=boundaries)
        return RequestState(request, reads=True)

    def _make(
        self,
        token_ids: TokenIds,
        mode: GenerationMode | str,
        reuse: ReuseOptions,
        params: SamplingParams | None = None,
        grammar: Grammar | None = None,
        *,
        keep: bool = True,
        boundaries: Sequence[int] = (),
        tenant: str = "",
        heal: str | None = None,
        exactness: str = "repaired",
        speculate: str | int | None = None,
    ) -> Request:
        self._lifetime.check()
        how: dict[str, Any] = dict(reuse)
        applied = self._runtime.adapters.applied(how.pop("adapter", None), token_ids)
        longest = self._runtime.model.context_length
        if longest is not None and len(token_ids) >= longest:
            raise ContextLengthError(len(token_ids), longest)
        config = self._settings.config
        return make_request(
            token_ids,
            mode,
            params or SamplingParams(max_new_tokens=1),
            config.repair,
            keep,
            boundaries,
            tenant,
            config.heal if heal is None else heal,
            exactness,
            grammar,
            applied,
            config.speculate if speculate is None else speculate,
            **how,
        )
