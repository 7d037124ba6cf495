"""What one request may choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, TypedDict

from kvboost.config import (
    EXACTNESS,
    HEAL,
    GenerationMode,
    RepairParams,
    SamplingParams,
    choose,
    most_drafted,
    one_of,
    stop_strings,
    unknown_option,
    within,
)
from kvboost.errors import ConfigError
from kvboost.model.adapters.adapter import AppliedAdapter
from kvboost.runtime.request import Request
from kvboost.structured.formats import FormatOptions
from kvboost.structured.grammars import Grammar
from kvboost.tokens.hashing import TokenIds
from kvboost.tokens.images import PlacedImages


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
    """What a request may share, and how it repairs moved text. Default: the engine's settings.
    ``adapter`` is the name of a loaded adapter; text is shared only under the same one."""

    cache_salt: str
    recompute_strategy: str | None
    recompute_ratio: float | None
    recompute_tolerance: float | None
    reuse_moved: str | None
    adapter: str | None


class RequestOptions(SamplingOptions, ReuseOptions, FormatOptions, total=False):
    """What a request may choose. ``keep=False`` leaves nothing of it in the cache;
    ``boundaries`` are the token positions at which its documents begin: no chunk crosses one.
    ``tenant`` names the user it counts for: while requests wait, tenants take turns, and no tenant
    can fill the queue. It does not separate caches; ``cache_salt`` does. ``heal`` overrides the
    engine's. ``exactness="verified"`` gives the answer of exact rows. ``speculate`` overrides the
    engine's."""

    keep: bool
    boundaries: Sequence[int]
    tenant: str
    heal: str | None
    exactness: str
    speculate: str | int | None


class BatchOptions(RequestOptions, total=False):
    """What one prompt of a batch may choose."""

    max_new_tokens: int
    mode: GenerationMode | str


FILLED_IN = {"max_new_tokens", "end_ids", "bad_word_ids"}
"""Fields of SamplingParams that are no options."""
_SAMPLING = {option.name for option in fields(SamplingParams)} - FILLED_IN
_REUSE = set(ReuseOptions.__annotations__)
_ALL = _SAMPLING | set(RequestOptions.__annotations__)


def split(max_new_tokens: int, options: RequestOptions) -> tuple[SamplingParams, ReuseOptions]:
    """Splits a request's options into sampling and reuse; an unknown option is an error."""
    refuse_unknown(options, _ALL)
    given: dict[str, Any] = {name: options[name] for name in options if name in _SAMPLING}  # type: ignore[literal-required]
    given["stop"] = stop_strings(options.get("stop"))
    for name in ("stop_token_ids", "bad_words", "allowed_token_ids"):
        if given.get(name) is not None:
            given[name] = tuple(given[name])
    shared: Any = {name: value for name, value in options.items() if name in _REUSE}
    return SamplingParams(max_new_tokens=max_new_tokens, **given), shared


def refuse_unknown(options: Mapping[str, object], known: set[str]) -> None:
    for name in options:
        if name not in known:
            raise unknown_option(name, known)


def make_request(
    token_ids: TokenIds,
    mode: GenerationMode | str,
    params: SamplingParams,
    repair: RepairParams,
    keep: bool,
    boundaries: Sequence[int],
    tenant: str = "",
    heal: str = "auto",
    exactness: str = "repaired",
    grammar: Grammar | None = None,
    applied: AppliedAdapter | None = None,
    speculate: str | int = "auto",
    images: PlacedImages | None = None,
    *,
    cache_salt: str = "",
    recompute_strategy: str | None = None,
    recompute_ratio: float | None = None,
    recompute_tolerance: float | None = None,
    reuse_moved: str | None = None,
) -> Request:
    """A checked request. ``repair`` holds the engine's own settings, used unless the request gives
    others."""
    for name, value in (("cache_salt", cache_salt), ("tenant", tenant)):
        if not isinstance(value, str):
            raise ConfigError(f"{name}={value!r} must be a string")
    if not isinstance(keep, bool):
        raise ConfigError(f"keep={keep!r} must be True or False")
    for place in boundaries:
        within(place, 0, len(token_ids), "boundaries")
    if recompute_strategy is not None:
        repair = replace(repair, strategy=recompute_strategy)
    if recompute_ratio is not None:
        repair = replace(repair, ratio=recompute_ratio)
    if recompute_tolerance is not None:
        repair = replace(repair, tolerance=recompute_tolerance)
    if reuse_moved is not None:
        repair = replace(repair, reuse_moved=reuse_moved)
    if grammar is not None and params.ignore_eos:
        raise ConfigError("ignore_eos=True does not go with a format: the format says where to end")
    if grammar is not None and params.rules_out:
        raise ConfigError(
            "min_new_tokens, bad_words and allowed_token_ids do not go with a format: the format "
            "says which tokens may come"
        )
    mode = choose(GenerationMode, mode, "mode")
    if params.prompt_logprobs is not None:  # they take the logits of all rows
        mode = GenerationMode.BASELINE
    one_of(heal, HEAL, "heal")
    one_of(exactness, EXACTNESS, "exactness")
    if exactness == "verified" and mode is GenerationMode.CHUNK_KV_REUSE:
        mode = GenerationMode.PREFIX_CACHE
    most_drafted(speculate)
    return Request(
        token_ids,
        mode,
        cache_salt,
        params,
        repair,
        keep,
        tuple(boundaries),
        tenant,
        heal,
        exactness,
        grammar,
        applied,
        speculate,
        images,
    )
