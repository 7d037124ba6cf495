"""The fields that chat and completions share, in the names of OpenAI, vLLM, SGLang and llama.cpp.

A field is honoured if the engine can do what it says. It is accepted if it changes no answer. It is
refused, with the reason, if to leave it out would change the answer.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import ConfigDict, Field, Tag, model_validator

from kvboost.serve.request_documents import SessionId, Ttl
from kvboost.serve.request_fields import (
    MAX_N,
    MAX_STOPS,
    MAX_WORDS,
    WHOLE,
    Body,
    LogitBias,
    MaxTokens,
    No,
    OwnBody,
    Penalty,
    Seed,
    Share,
    ShortText,
    SomeText,
    Speculate,
    Temperature,
    Text,
    TokenId,
    TokenIds,
    TopK,
    Truncate,
    goes_with,
    one_of,
    some,
    stop_kind,
)
from kvboost.serve.request_formats import Formats


def needs(field: str, kind: str, other: str, has: dict[str, Any] | None = None) -> dict[str, Any]:
    """JSON Schema for: ``field``, if it is of this ``kind``, needs ``other``, which must be true or
    as ``has`` says."""
    return {
        "if": {"properties": {field: {"type": kind}}, "required": [field]},
        "then": {"properties": {other: has or {"const": True}}, "required": [other]},
    }


Stop = Annotated[
    Annotated[SomeText, Tag("as text")]
    | Annotated[list[SomeText], some(MAX_STOPS, least=0), Tag("as list")],
    one_of(stop_kind, f"a string that is not empty, or a list of up to {MAX_STOPS}"),
]
RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100.0)]


class ReuseOptions(OwnBody):
    """How this request reuses cached text. Default: the server's settings."""

    model_config = ConfigDict(
        frozen=True,  # so that requests share the default
        json_schema_extra=needs("session_ttl", "number", "session", {"type": "string"}),
    )

    mode: Literal["baseline", "prefix_cache", "chunk_kv_reuse"] | None = None
    strategy: Literal["auto", "query", "cacheblend", "selective", "none"] | None = None
    ratio: Share | None = None
    reuse_moved: Literal["when_faster", "always"] | None = None
    """Whether moved text is reused where that is not expected to be faster."""
    heal: Literal["auto", "idle", "off"] | None = None
    exactness: Literal["repaired", "verified"] | None = None
    speculate: Speculate | None = None
    """Whether tokens are drafted, and how many at most."""
    session: SessionId | None = None
    """The conversation that this request belongs to. Its KV is pinned after the answer."""
    session_ttl: Ttl | None = None
    """For how many seconds; default: the server's."""
    explain: bool = False
    """Whether the spans of the answer include their text."""

    @model_validator(mode="after")
    def _check_session(self) -> Self:
        if self.session_ttl is not None and self.session is None:
            raise goes_with("session_ttl", "session_ttl goes with session")
        return self

    def engine_options(self) -> dict[str, Any]:
        return {
            "recompute_strategy": self.strategy,
            "recompute_ratio": self.ratio,
            "reuse_moved": self.reuse_moved,
            "heal": self.heal,
            "exactness": self.exactness,
            "speculate": self.speculate,
        }


class StreamOptions(Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Whether every chunk says how many tokens there are so far."""
    include_obfuscation: bool | None = None
    """Changes nothing: no chunk is padded."""


class Generation(Formats):
    """The fields that chat and completions share."""

    model: Text
    n: Annotated[int, Field(ge=1, le=MAX_N), WHOLE] | None = None
    max_tokens: MaxTokens | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: TopK | None = None
    min_p: Share | None = None
    repetition_penalty: RepetitionPenalty | None = None
    repeat_penalty: RepetitionPenalty | None = None
    """The same in llama.cpp's words."""
    seed: Seed | None = None
    stop: Stop | None = None
    stop_token_ids: Annotated[list[TokenId], some(MAX_WORDS, least=0)] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31), WHOLE] | None = None
    bad_words: Annotated[list[SomeText], some(MAX_WORDS, least=0)] | None = None
    allowed_token_ids: TokenIds | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    truncate_prompt_tokens: Truncate | None = None
    """Only so many of the prompt's last tokens are read; -1: as many as the context holds."""
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: ShortText = ""
    kvboost: ReuseOptions = ReuseOptions()
    # Fields that change no answer here.
    user: Text | None = None
    priority: Annotated[int, WHOLE] | None = None
    request_id: ShortText | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    use_beam_search: No | None = None
    spaces_between_special_tokens: bool | None = None
    cache_prompt: bool | None = None
    # Fields that are not supported.
    lora_path: None = None
    structural_tag: None = None

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise goes_with("stream_options", "stream_options goes with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise goes_with("prompt_logprobs", "prompt_logprobs does not go with stream=true")
        return self

    def engine_options(self) -> dict[str, Any]:
        """The engine's options, apart from formats; None where a field is not given."""
        bias, penalty = self.logit_bias, self.repetition_penalty
        return {
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_p": self.top_p,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "min_p": self.min_p,
            "repetition_penalty": self.repeat_penalty if penalty is None else penalty,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "include_stop": self.include_stop_str_in_output,
            "ignore_eos": self.ignore_eos,
            "min_new_tokens": self.min_tokens,
            "bad_words": self.bad_words,
            "allowed_token_ids": self.allowed_token_ids,
            "skip_special_tokens": self.skip_special_tokens,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": None if bias is None else {int(key): bias[key] for key in bias},
            "prompt_logprobs": self.prompt_logprobs,
            **self.kvboost.engine_options(),
        }
