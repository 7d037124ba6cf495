"""What one request may choose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, TypedDict

from kvboost.config import GenerationMode, SamplingParams, stop_strings
from kvboost.errors import ConfigError


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
    logprobs: int | None
    ignore_eos: bool


class ReuseOptions(TypedDict, total=False):
    """What a request may share, and how it repairs moved text; by default as the engine does."""

    cache_salt: str
    recompute_strategy: str | None
    recompute_ratio: float | None
    reuse_moved: str | None


class RequestOptions(SamplingOptions, ReuseOptions, total=False):
    """What a request may choose. ``keep=False`` leaves nothing of it in the cache;
    ``boundaries`` are the token positions where its documents begin, for the cutting of chunks."""

    keep: bool
    boundaries: Sequence[int]


class BatchOptions(RequestOptions, total=False):
    """What one prompt of a batch may choose."""

    max_new_tokens: int
    mode: GenerationMode | str


def split(max_new_tokens: int, options: RequestOptions) -> tuple[SamplingParams, ReuseOptions]:
    """A request's options by whom they concern; an unknown one is an error."""
    sampling = {option.name for option in fields(SamplingParams)}
    reuse = set(ReuseOptions.__annotations__)
    refuse_unknown(options, sampling | reuse | {"keep", "boundaries"})
    given: dict[str, Any] = {name: options[name] for name in options if name in sampling}  # type: ignore[literal-required]
    given["stop"] = stop_strings(options.get("stop"))
    shared: Any = {name: value for name, value in options.items() if name in reuse}
    return SamplingParams(max_new_tokens=max_new_tokens, **given), shared


def refuse_unknown(options: Mapping[str, object], known: set[str]) -> None:
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; there are {', '.join(sorted(known))}")
