"""What callers ask for, checked: the requests of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from kvboost.config import GenerationMode, SamplingParams, within
from kvboost.errors import ContextLengthError, ImageError, PromptError
from kvboost.model.adapters.adapter import Adapter
from kvboost.model.vision.tower import VisionTower
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
        params, reuse = split(max_new_tokens, options)
        params = self._resolve(params)
        read = self._prompts.read_whole(prompt)
        grammar = self._grammars.of_format(options)
        request = self._make(
            read,
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
            marks=options.get("marks", ()),
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
        self, prompt: ReadPrompt, mode: GenerationMode | str, options: ReuseOptions
    ) -> Request:
        """A request whose answer does not matter. Unknown options are an error."""
        refuse_unknown(options, set(ReuseOptions.__annotations__))
        return self._make(prompt, mode, options)

    def planned(
        self, prompt: ReadPrompt, mode: GenerationMode | str, options: ReuseOptions
    ) -> Request:
        """The same for a request that is never run: its images need not be there."""
        refuse_unknown(options, set(ReuseOptions.__annotations__))
        return self._make(prompt, mode, options, runs=False)

    def reading(
        self, prompt: ReadPrompt, salt: str, boundaries: Sequence[int], adapter: str | None
    ) -> RequestState:
        """A request that reads a text and answers nothing."""
        options: ReuseOptions = {"cache_salt": salt, "adapter": adapter}
        mode = GenerationMode.PREFIX_CACHE
        request = self._make(prompt, mode, options, boundaries=boundaries)
        return RequestState(request, reads=True)

    def _make(
        self,
        prompt: ReadPrompt,
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
        runs: bool = True,
        marks: Sequence[int] = (),
    ) -> Request:
        self._lifetime.check()
        token_ids, images = prompt.token_ids, prompt.images
        if runs:
            _check_images(prompt)
        how: dict[str, Any] = dict(reuse)
        name = how.pop("adapter", None)
        applied = self._runtime.adapters.applied(name, token_ids)
        if applied is not None and images is not None:
            _check_sight(self._runtime.model.vision, applied.adapter, name)
        longest = self._runtime.model.context_length
        if longest is not None and len(token_ids) >= longest:
            raise ContextLengthError(len(token_ids), longest)
        if images is not None and images.is_spatial:
            boundaries = (*boundaries, *images.edges)
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
            images,
            marks,
            **how,
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
