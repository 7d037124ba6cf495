"""The options of one request."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict

from kvboost.config import GenerationMode, SamplingParams, stop_strings, unknown_option
from kvboost.structured.formats import FormatOptions


class SamplingOptions(TypedDict, total=False):
    """How tokens are picked; see ``SamplingParams`` for what each leaves to the model."""

    do_sample: bool | None
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int]
    include_stop: bool
    min_new_tokens: int
    bad_words: Sequence[str]
    allowed_token_ids: Sequence[int] | None
    logprobs: int | None
    prompt_logprobs: int | None
    ignore_eos: bool
    skip_special_tokens: bool


class ReuseOptions(TypedDict, total=False):
    """The options of reuse: what a request may share, and how it repairs moved text. Default: the
    engine's settings. ``adapter`` is the name of a loaded adapter; text is shared only under the
    same one."""

    cache_salt: str
    recompute_strategy: str | None
    recompute_ratio: float | None
    reuse_moved: str | None
    adapter: str | None


class RequestOptions(SamplingOptions, ReuseOptions, FormatOptions, total=False):
    """All options of a request. ``keep=False`` leaves nothing of it in the cache; ``boundaries``
    are the token positions at which its documents begin: no chunk crosses one. ``marks`` are
    positions after which other prompts may go on otherwise: there, a model with states keeps them.
    ``tenant`` names the user that the request counts for: while requests wait, tenants take turns,
    and no tenant can fill the queue. It does not separate caches; ``cache_salt`` does. ``heal``
    overrides the engine's. ``exactness="verified"`` gives the answer of exact rows. ``speculate``
    overrides the engine's."""

    keep: bool
    boundaries: Sequence[int]
    marks: Sequence[int]
    tenant: str
    heal: str | None
    exactness: str
    speculate: str | int | None


class BatchOptions(RequestOptions, total=False):
    """The options of one prompt of a batch."""

    max_new_tokens: int
    mode: GenerationMode | str


FILLED_IN = {"max_new_tokens", "end_ids", "bad_word_ids"}
"""Fields of SamplingParams that are no options."""
_SAMPLING = {option.name for option in fields(SamplingParams)} - FILLED_IN
_ALL = _SAMPLING | set(RequestOptions.__annotations__)


def sampling_params(max_new_tokens: int, options: Mapping[str, Any]) -> SamplingParams:
    """Those of a request's options; an unknown option is an error."""
    refuse_unknown(options, _ALL)
    given = {name: value for name, value in options.items() if name in _SAMPLING}
    given["stop"] = stop_strings(options.get("stop"))
    for name in ("stop_token_ids", "bad_words", "allowed_token_ids"):
        if given.get(name) is not None:
            given[name] = tuple(given[name])
    return SamplingParams(max_new_tokens=max_new_tokens, **given)


def refuse_unknown(options: Mapping[str, object], known: Collection[str]) -> None:
    for name in options:
        if name not in known:
            raise unknown_option(name, known)
