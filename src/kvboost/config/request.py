"""The options of one request: how much of the cache it uses, and how it picks its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from kvboost.config.validation import at_least, whole, within
from kvboost.errors import ConfigError

HEAL = ("auto", "idle", "off")
EXACTNESS = ("repaired", "verified")
SPECULATE = ("auto", "off")
MOST_DRAFTED, LIMIT_DRAFTED = 16, 64
"""Tokens of a draft: the most by default, and the most that may be asked for."""


class GenerationMode(str, Enum):
    """How much of the cache a request may use."""

    BASELINE = "baseline"
    """No reuse: the request reads nothing from the cache and adds nothing to it. A single prompt
    is computed exactly as stock transformers computes it; the other modes use KVBoost's own
    kernels where there are any. On a GPU, tokens after the first come from KVBoost's kernels too,
    and may round differently."""
    PREFIX_CACHE = "prefix_cache"
    """Exact hits only: the answer is the one that the model gives without a cache."""
    CHUNK_KV_REUSE = "chunk_kv_reuse"
    """Exact hits, and text that was cached at another place, which is moved and repaired. This is
    faster, and the answer is close to the one without a cache. Every result says how many rows
    were moved."""


def most_drafted(speculate: str | int) -> int:
    """The most tokens of a draft that the option ``speculate`` allows. Raises ConfigError if it is
    neither of ``SPECULATE`` nor such a number."""
    if isinstance(speculate, str) and speculate in SPECULATE:
        return MOST_DRAFTED if speculate == "auto" else 0
    if isinstance(speculate, bool) or not isinstance(speculate, int):
        raise ConfigError(
            f"speculate={speculate!r} is not available; choose 'auto', 'off' or the most tokens of "
            f"a draft, 1 to {LIMIT_DRAFTED}"
        )
    within(speculate, 1, LIMIT_DRAFTED, "speculate")
    return speculate


@dataclass(frozen=True)
class SamplingParams:
    """How one request picks its tokens. ``None`` takes the value of the model's generation config.

    A request is greedy unless temperature, top_k, top_p or min_p is given; then it samples, unless
    ``do_sample=False`` or ``temperature=0`` says otherwise.
    """

    max_new_tokens: int = 64
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    """Subtracted from the logits of every token that was already generated."""
    frequency_penalty: float | None = None
    """The same, multiplied by how often the token was generated."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens."""
    seed: int | None = None
    stop: tuple[str, ...] = ()
    """Strings that end the answer."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the answer, in addition to those that end the model's sequences."""
    include_stop: bool = False
    """Whether the text ends with the string or token of these that ended it."""
    min_new_tokens: int = 0
    """No token ends the answer before it has so many."""
    bad_words: tuple[str, ...] = ()
    """Strings that the answer never has, as far as they are tokenized in the usual way."""
    allowed_token_ids: tuple[int, ...] | None = None
    """The only tokens that the answer may have."""
    logprobs: int | None = None
    """Adds the log probability of each token, and this many of the likeliest tokens at its
    place."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt. All of it is computed then."""
    ignore_eos: bool = False
    """Whether the answer goes on after a token that ends the model's sequences."""
    skip_special_tokens: bool = True
    """Whether the text of the answer leaves out special tokens."""
    end_ids: tuple[int, ...] = ()
    """Filled in by the engine: the tokens that end the model's sequences."""
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    """Filled in by the engine: ``bad_words`` as token ids, each in its usual forms."""

    def __post_init__(self) -> None:
        whole(self.max_new_tokens, 1, "max_new_tokens")
        if self.do_sample is not None and not isinstance(self.do_sample, bool):
            raise ConfigError(f"do_sample={self.do_sample!r} must be True, False or None")
        if self.temperature is not None:
            at_least(self.temperature, 0.0, "temperature")
        if self.top_k is not None:
            whole(self.top_k, 0, "top_k")
        for option in ("top_p", "min_p"):
            if (share := getattr(self, option)) is not None:
                within(share, 0.0, 1.0, option)
        if self.repetition_penalty is not None:
            at_least(self.repetition_penalty, 0.01, "repetition_penalty")
        for option in ("presence_penalty", "frequency_penalty"):
            if (penalty := getattr(self, option)) is not None:
                within(penalty, -2.0, 2.0, option)
        for token, bias in (self.logit_bias or {}).items():
            whole(token, 0, "logit_bias: a token id")
            within(bias, -100.0, 100.0, f"logit_bias of {token}")
        if self.seed is not None:
            whole(self.seed, 0, "seed")
            within(self.seed, 0, 2**63 - 1, "seed")
        for option in ("stop", "bad_words"):
            if not all(isinstance(text, str) and text for text in getattr(self, option)):
                raise ConfigError(f"{option}={getattr(self, option)!r} must hold non-empty strings")
        for option in ("logprobs", "prompt_logprobs"):
            if (number := getattr(self, option)) is not None:
                whole(number, 0, option)
                within(number, 0, 20, option)
        whole(self.min_new_tokens, 0, "min_new_tokens")
        within(self.min_new_tokens, 0, self.max_new_tokens, "min_new_tokens")
        for option in ("stop_token_ids", "allowed_token_ids"):
            for token in getattr(self, option) or ():
                whole(token, 0, f"{option}: a token id")
        if self.allowed_token_ids == ():
            raise ConfigError("allowed_token_ids=() allows no token at all; leave it out")
        for option in ("ignore_eos", "skip_special_tokens", "include_stop"):
            if not isinstance(value := getattr(self, option), bool):
                raise ConfigError(f"{option}={value!r} must be True or False")

    @property
    def rules_out(self) -> bool:
        """Whether some tokens may not come at some places."""
        return bool(self.min_new_tokens or self.bad_words) or self.allowed_token_ids is not None

    @property
    def samples(self) -> bool:
        """Whether tokens are drawn at random; otherwise the likeliest one is taken."""
        if self.do_sample is False or self.temperature == 0:
            return False
        given = (self.temperature, self.top_k, self.top_p, self.min_p)
        return bool(self.do_sample) or any(value is not None for value in given)


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """The user's ``stop`` as a tuple: one string, several, or none."""
    if stop is None:
        return ()
    if isinstance(stop, str):
        return (stop,)
    if not isinstance(stop, Sequence):
        raise ConfigError(f"stop={stop!r} must be a string or several strings")
    return tuple(stop)
