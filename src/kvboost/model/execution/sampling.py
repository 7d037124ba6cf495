"""Picks the next token with transformers' own logits processors, one set per request."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kvboost.config import SamplingParams
from kvboost.results import TokenLogprob

# Settings of a model's generation config that change its output and that we do not apply.
NOT_APPLIED = (
    "bad_words_ids",
    "begin_suppress_tokens",
    "encoder_repetition_penalty",
    "epsilon_cutoff",
    "eta_cutoff",
    "exponential_decay_length_penalty",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "guidance_scale",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "num_beams",
    "sequence_bias",
    "stop_strings",
    "suppress_tokens",
    "typical_p",
)


Picked = tuple[int, TokenLogprob | None]
"""The next token, and its log probabilities if they were asked for."""


class TokenMask(Protocol):
    """Says which tokens may come next."""

    def allowed(self) -> bytes:
        """One bit per token, the lowest first."""


class PickedSoon(Protocol):
    """A token that is being picked."""

    @property
    def is_done(self) -> Callable[[], bool] | None:
        """Tells whether a device has picked the token; None if no device picks it."""

    def get(self) -> Picked:
        """Waits for it."""


@dataclass(frozen=True)
class PickedNow:
    """A token that has been picked."""

    picked: Picked
    is_done: None = None

    def get(self) -> Picked:
        return self.picked


class Sampler:
    """Picks the tokens of one request on the host: a ``TokenSampler`` of
    ``model/paged/sampling.py``. It has its own random generator: a seed gives the same
    tokens, whatever else is running."""

    def __init__(
        self,
        params: SamplingParams,
        defaults: GenerationConfig,
        prompt_ids: Sequence[int] | npt.NDArray[np.integer[Any]],
        device: torch.device,
        mask: TokenMask | None = None,
    ) -> None:
        self._logprobs = params.logprobs
        self._generator: torch.Generator | None = None
        if params.samples:
            self._generator = torch.Generator(device=device)
            if params.seed is None:
                self._generator.seed()
            else:
                self._generator.manual_seed(params.seed)
        self._processors = _processors(params, defaults, len(prompt_ids), mask)
        self._seen: torch.Tensor | None = None
        if self._processors:
            self._seen = torch.tensor(prompt_ids, dtype=torch.long, device=device)

    def __call__(self, logits: torch.Tensor) -> Picked:
        """The next token, given the model's logits ``[vocab]``."""
        if self._seen is None and self._generator is None:
            token_id = int(torch.argmax(logits))
            return token_id, self._describe(logits, token_id)
        scores = logits.to(torch.float32, copy=True)[None]
        if self._seen is not None:
            for process in self._processors:  # the list would inspect their signatures every time
                scores = process(self._seen[None], scores)
        if self._generator is None:
            token = torch.argmax(scores, dim=-1)
        else:
            probabilities = torch.softmax(scores, dim=-1)
            token = torch.multinomial(probabilities, 1, generator=self._generator)[0]
        if self._seen is not None:
            self._seen = torch.cat([self._seen, token])
        token_id = int(token)
        return token_id, self._describe(logits, token_id)

    def begin(self, logits: torch.Tensor, position: int, last: int) -> PickedNow:
        return PickedNow(self(logits))

    def for_steps(self, *, drafted: bool) -> None:
        return None

    def note(self, token_ids: Sequence[int]) -> None:
        if self._seen is not None:
            more = torch.tensor(token_ids, dtype=torch.long, device=self._seen.device)
            self._seen = torch.cat([self._seen, more])

    def _describe(self, logits: torch.Tensor, token_id: int) -> TokenLogprob | None:
        if self._logprobs is None:
            return None
        logprobs = torch.log_softmax(logits.float(), dim=-1)
        values, ids = logprobs.topk(self._logprobs)
        top = tuple(zip(ids.tolist(), values.tolist(), strict=True))
        return TokenLogprob(token_id, float(logprobs[token_id]), top)


def describe_rows(
    logits: torch.Tensor, token_ids: npt.NDArray[np.integer[Any]], num_top: int
) -> list[TokenLogprob]:
    """The log probabilities of ``token_ids``, given the logits of the rows before them,
    ``[rows, vocab]``; there may be one row more. With ``num_top`` of the likeliest tokens each."""
    logprobs = torch.log_softmax(logits[: len(token_ids)].float(), dim=-1)
    chosen = torch.from_numpy(token_ids.astype(np.int64)).to(logprobs.device)
    own = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
    values, ids = logprobs.topk(num_top)
    return [
        TokenLogprob(int(token), logprob, tuple(zip(top_ids, top, strict=True)))
        for token, logprob, top_ids, top in zip(
            token_ids, own, ids.tolist(), values.tolist(), strict=True
        )
    ]


LEAST_TEMPERATURE = 1e-6
"""Lower temperatures choose the same tokens, and dividing by them overflows float32."""


class GeneratedPenalty:
    """Lowers the logits of generated tokens, once (``presence``) and per occurrence
    (``frequency``), and adds ``bias``: OpenAI's penalties, which transformers does not have."""

    def __init__(
        self, prompt_tokens: int, presence: float, frequency: float, bias: Mapping[int, float]
    ) -> None:
        self._prompt_tokens = prompt_tokens
        self._presence = presence
        self._frequency = frequency
        self._penalizes, self._biases = bool(presence or frequency), bool(bias)
        self._biased = torch.tensor(list(bias), dtype=torch.long)
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """As a logits processor: ``[1, tokens]`` and ``[1, vocab]``, in place."""
        if self._penalizes:
            generated = input_ids[0, self._prompt_tokens :]
            tokens, counts = generated.unique(return_counts=True)
            scores[0, tokens] -= self._presence + self._frequency * counts
        if self._biases:
            device = scores.device
            scores[0].index_add_(0, self._biased.to(device), self._bias.to(device))
        return scores


class AllowedTokens:
    """Removes the tokens that a mask does not allow, and the padding of the vocabulary."""

    def __init__(self, mask: TokenMask) -> None:
        self._mask = mask

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """As a logits processor: ``[1, tokens]`` and ``[1, vocab]``, in place."""
        packed = torch.frombuffer(bytearray(self._mask.allowed()), dtype=torch.uint8)
        packed = packed.to(scores.device)[:, None]
        bits = packed >> torch.arange(8, dtype=torch.uint8, device=scores.device) & 1
        allowed = bits.flatten()[: scores.shape[1]] > 0
        scores[0, : len(allowed)].masked_fill_(~allowed, float("-inf"))
        scores[0, len(allowed) :] = float("-inf")
        return scores


class RuledOut:
    """Removes the tokens that a request rules out: those that are not allowed, those that would
    complete a bad word, and those that would end the answer too early. Of the last two kinds, none
    is removed if no token would be left."""

    def __init__(self, params: SamplingParams, prompt_tokens: int) -> None:
        self._prompt_tokens = prompt_tokens
        self._min_tokens = params.min_new_tokens
        self._ends = [*params.end_ids, *params.stop_token_ids]
        self._allowed = params.allowed_token_ids
        self._bad_words = params.bad_word_ids

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """As a logits processor: ``[1, tokens]`` and ``[1, vocab]``, in place."""
        if self._allowed is not None:
            kept = scores[0, list(self._allowed)]
            scores.fill_(float("-inf"))
            scores[0, list(self._allowed)] = kept
        written = input_ids[0, self._prompt_tokens :].tolist()
        removed = self._ends if len(written) < self._min_tokens else []
        removed = [*removed, *self._completing(written)]
        left = scores.clone()
        left[0, removed] = float("-inf")
        return left if bool(left.isfinite().any()) else scores

    def _completing(self, written: list[int]) -> list[int]:
        """The tokens that would complete a bad word."""
        return [
            last
            for *before, last in self._bad_words
            if written[len(written) - len(before) :] == before
        ]


def _processors(
    params: SamplingParams, defaults: GenerationConfig, prompt_tokens: int, mask: TokenMask | None
) -> LogitsProcessorList:
    """The processors, in the order in which transformers applies them; a mask comes after the
    penalties."""
    processors = LogitsProcessorList()
    penalties = (params.presence_penalty or 0.0, params.frequency_penalty or 0.0)
    if any(penalties) or params.logit_bias:
        processors.append(GeneratedPenalty(prompt_tokens, *penalties, params.logit_bias or {}))
    options = chosen(params, defaults)
    if options.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(options.repetition_penalty))
    if mask is not None:
        processors.append(AllowedTokens(mask))
    if params.rules_out:
        processors.append(RuledOut(params, prompt_tokens))
    if not params.samples:
        return processors
    if options.temperature != 1.0:
        processors.append(TemperatureLogitsWarper(max(options.temperature, LEAST_TEMPERATURE)))
    if options.top_k:
        processors.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1.0:
        processors.append(TopPLogitsWarper(options.top_p))
    if options.min_p:
        processors.append(MinPLogitsWarper(options.min_p))
    return processors


def takes_likeliest(params: SamplingParams, defaults: GenerationConfig) -> bool:
    """Whether every token of a request is the likeliest one of the model's own distribution."""
    return not params.samples and not _processors(params, defaults, 0, None)


@dataclass(frozen=True)
class ChosenOptions:
    """A request's options, or what the model's generation config has instead."""

    repetition_penalty: float
    temperature: float
    top_k: int
    """0 keeps all tokens."""
    top_p: float
    min_p: float


def chosen(params: SamplingParams, defaults: GenerationConfig) -> ChosenOptions:
    def first(name: str, neutral: float) -> float:
        for options in (params, defaults):
            if (value := getattr(options, name)) is not None:
                return float(value)
        return neutral

    return ChosenOptions(
        first("repetition_penalty", 1.0),
        first("temperature", 1.0),
        int(first("top_k", 0)),
        first("top_p", 1.0),
        first("min_p", 0.0),
    )


def warn_about_defaults(defaults: GenerationConfig) -> None:
    """Warns of settings in the model's generation config that are not applied."""
    ignored = [
        name for name in NOT_APPLIED if getattr(defaults, name, None) not in (None, 0, 1.0, [])
    ]
    if ignored:
        warnings.warn(
            f"the model's generation config sets {', '.join(ignored)}, which KVBoost does not "
            "apply",
            stacklevel=2,
        )


def eos_ids(defaults: GenerationConfig) -> frozenset[int]:
    ids = defaults.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset(ids if isinstance(ids, list) else [ids])
