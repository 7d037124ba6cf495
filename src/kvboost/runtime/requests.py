"""Checks what callers ask for, and makes the requests of an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kvboost.config import (
    EXACTNESS,
    HEAL,
    GenerationMode,
    RepairParams,
    SamplingParams,
    choose,
    most_drafted,
    one_of,
    within,
)
from kvboost.errors import ConfigError, ContextLengthError, ImageError, PromptError
from kvboost.model.adapters.adapter import Adapter
from kvboost.model.vision.tower import VisionTower
from kvboost.results import Clock
from kvboost.runtime.options import RequestOptions, ReuseOptions, refuse_unknown, sampling_params
from kvboost.runtime.request import Request, RequestState
from kvboost.runtime.runtime import Runtime
from kvboost.runtime.settings import Lifetime, Settings
from kvboost.structured.grammars import Grammar, Grammars
from kvboost.tokens.hashing import TokenIds
from kvboost.tokens.images import ReadPrompt, is_image_row
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
        params = self._resolve(sampling_params(max_new_tokens, options))
        read = self._prompts.read_whole(prompt)
        grammar = self._grammars.of_format(options)
        request = self._make(read, mode, options, params, grammar)
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
        self,
        prompt: ReadPrompt,
        mode: GenerationMode | str,
        options: ReuseOptions,
        *,
        runs: bool = True,
    ) -> Request:
        """A request whose answer does not matter. Unknown options are an error. If it never
        ``runs``, its images need not be there."""
        refuse_unknown(options, ReuseOptions.__annotations__)
        return self._make(prompt, mode, options, runs=runs)

    def reading(
        self, prompt: ReadPrompt, salt: str, boundaries: Sequence[int], adapter: str | None
    ) -> RequestState:
        """A request that reads a text and answers nothing."""
        options = {"cache_salt": salt, "adapter": adapter, "boundaries": boundaries}
        request = self._make(prompt, GenerationMode.PREFIX_CACHE, options)
        return RequestState(request, reads=True)

    def _make(
        self,
        prompt: ReadPrompt,
        mode: GenerationMode | str,
        options: Mapping[str, Any],
        params: SamplingParams | None = None,
        grammar: Grammar | None = None,
        *,
        runs: bool = True,
    ) -> Request:
        """``options`` are a request's, those of ``params`` and ``grammar`` aside; all are
        checked."""
        self._lifetime.check()
        params = params or SamplingParams(max_new_tokens=1)
        token_ids, images = prompt.token_ids, prompt.images
        if runs:
            _check_images(prompt)
        name = options.get("adapter")
        adapter = self._runtime.adapters.applied(name, token_ids)
        if adapter is not None and images is not None:
            _check_sight(self._runtime.model.vision, adapter.adapter, str(name))
        longest = self._runtime.model.context_length
        if longest is not None and len(token_ids) >= longest:
            raise ContextLengthError(len(token_ids), longest)
        boundaries, marks = options.get("boundaries", ()), options.get("marks", ())
        if images is not None and images.is_spatial:
            boundaries = (*boundaries, *images.edges)
        for place in boundaries:
            within(place, 0, len(token_ids), "boundaries")
        for place in marks:
            within(place, 0, len(token_ids), "marks")
        salt, tenant = options.get("cache_salt", ""), options.get("tenant", "")
        for option, value in (("cache_salt", salt), ("tenant", tenant)):
            if not isinstance(value, str):
                raise ConfigError(f"{option}={value!r} must be a string")
        if not isinstance(keep := options.get("keep", True), bool):
            raise ConfigError(f"keep={keep!r} must be True or False")
        if grammar is not None:
            _check_format(params)
        config = self._settings.config
        heal, speculate = options.get("heal"), options.get("speculate")
        heal = config.heal if heal is None else heal
        speculate = config.speculate if speculate is None else speculate
        exactness = options.get("exactness", "repaired")
        one_of(heal, HEAL, "heal")
        one_of(exactness, EXACTNESS, "exactness")
        most_drafted(speculate)
        mode = choose(GenerationMode, mode, "mode")
        if params.prompt_logprobs is not None:  # they take the logits of all rows
            mode = GenerationMode.BASELINE
        if exactness == "verified" and mode is GenerationMode.CHUNK_KV_REUSE:
            mode = GenerationMode.PREFIX_CACHE
        return Request(
            token_ids=token_ids,
            mode=mode,
            salt=salt,
            params=params,
            repair=_repair(config.repair, options),
            keep=keep,
            boundaries=tuple(boundaries),
            tenant=tenant,
            heal=heal,
            exactness=exactness,
            grammar=grammar,
            adapter=adapter,
            speculate=speculate,
            images=images,
            marks=tuple(marks),
        )


def _repair(repair: RepairParams, options: Mapping[str, Any]) -> RepairParams:
    """The engine's ``repair`` with what a request chooses instead."""
    names = {
        "recompute_strategy": "strategy",
        "recompute_ratio": "ratio",
        "reuse_moved": "reuse_moved",
    }
    chosen: Any = {own: options.get(option) for option, own in names.items()}
    chosen = {own: value for own, value in chosen.items() if value is not None}
    return replace(repair, **chosen) if chosen else repair


def _check_format(params: SamplingParams) -> None:
    """Raises ConfigError if ``params`` do not go with a format."""
    if params.ignore_eos:
        raise ConfigError("ignore_eos=True does not go with a format: the format says where to end")
    if params.rules_out:
        raise ConfigError(
            "min_new_tokens, bad_words and allowed_token_ids do not go with a format: the format "
            "says which tokens may come"
        )


def _check_sight(vision: VisionTower | str, adapter: Adapter, name: str) -> None:
    """Raises ImageError if an adapter changes what images become."""
    if isinstance(vision, str) or vision.is_changed_by(adapter.deltas):
        raise ImageError(
            f"the adapter {name!r} changes how the model sees, which is not supported; send no "
            "images with it"
        )


def _check_images(prompt: ReadPrompt) -> None:
    """Raises PromptError if the ids have rows of images that are not there."""
    rows = is_image_row(prompt.token_ids)
    known = 0 if prompt.images is None else prompt.images.ends[-1]
    if rows.sum() != known:
        first = int(rows.argmax())
        raise PromptError(
            f"token {first}, {prompt.token_ids[first]}, is a row of an image that was not given: "
            "token ids have no images with them; give the messages with the image"
        )
