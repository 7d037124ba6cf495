"""The fields that chat and completions share, with their checks as the engine's options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, Tag, model_validator

from kvboost.chat.context_edits import THINKING, TOOL_USES, read_edits
from kvboost.chat.tool_use import ToolUse
from kvboost.errors import ConfigError
from kvboost.serve.schema import fields
from kvboost.serve.schema.formats import Formats


def _object(required: Sequence[str] = (), **properties: Any) -> dict[str, Any]:
    """An object without other fields. One that is not required may be null."""
    given = {
        name: schema if name in required else {"anyOf": [schema, {"type": "null"}]}
        for name, schema in properties.items()
    }
    schema = {"type": "object", "properties": given, "additionalProperties": False}
    return schema | ({"required": list(required)} if required else {})


def _amount(least: int, *types: str) -> dict[str, Any]:
    value = {"type": "integer", "minimum": least}
    return _object(("type", "value"), type={"enum": list(types)}, value=value)


_NAMES = {"type": "array", "items": {"type": "string"}}
_ALL = [{"const": "all"}, _object(("type",), type={"const": "all"})]

_TOOL_USES = _object(
    ("type",),
    type={"const": TOOL_USES},
    trigger=_amount(1, "input_tokens", "tool_uses"),
    keep=_amount(0, "tool_uses"),
    clear_at_least=_amount(0, "input_tokens"),
    exclude_tools=_NAMES,
    clear_tool_inputs={"anyOf": [{"type": "boolean"}, _NAMES]},
)

_THINKING = _object(
    ("type",), type={"const": THINKING}, keep={"anyOf": [_amount(1, "thinking_turns"), *_ALL]}
)

_EDITS = {"type": "array", "items": {"anyOf": [_THINKING, _TOOL_USES]}, "maxItems": 2}


def _check(given: dict[str, Any]) -> dict[str, Any]:
    """Raises a validation error that names the place of a mistake, such as ``edits[0].keep``."""
    try:
        read_edits(given)
    except ConfigError as error:
        said = str(error).removeprefix("context_management: ")
        raise fields.goes_with(said.partition("=")[0], said) from None
    return given


ContextManagement = Annotated[
    dict[str, Any], Field(json_schema_extra=_object(edits=_EDITS)), AfterValidator(_check)
]
"""Edits of a conversation before it is read. An unknown field in it is a mistake."""


def needs(field: str, kind: str, other: str, has: dict[str, Any] | None = None) -> dict[str, Any]:
    """JSON Schema: a ``field`` of this ``kind`` needs ``other``, true or as ``has`` says."""
    return {
        "if": {"properties": {field: {"type": kind}}, "required": [field]},
        "then": {"properties": {other: has or {"const": True}}, "required": [other]},
    }


NEEDS_STREAM = needs("stream_options", "object", "stream")

Stop = Annotated[
    Annotated[fields.SomeText, Tag("as text")]
    | Annotated[list[fields.SomeText], fields.some(fields.MAX_STOPS, least=0), Tag("as list")],
    fields.one_of(
        fields.stop_kind, f"a string that is not empty, or a list of up to {fields.MAX_STOPS}"
    ),
]

RepetitionPenalty = Annotated[float, Field(ge=0.01, le=100.0)]


class ReuseOptions(fields.OwnBody):
    """How this request reuses cached text. Default: the server's settings."""

    model_config = ConfigDict(
        frozen=True,  # so that requests share the default
        json_schema_extra=needs("session_ttl", "number", "session", {"type": "string"}),
    )

    mode: Literal["baseline", "prefix_cache", "chunk_kv_reuse"] | None = None
    strategy: Literal["auto", "query", "cacheblend"] | None = None
    ratio: fields.Share | None = None
    reuse_moved: Literal["when_faster", "always"] | None = None
    """Whether moved text is reused where that is not expected to be faster."""
    heal: Literal["auto", "idle", "off"] | None = None
    exactness: Literal["repaired", "verified"] | None = None
    speculate: fields.Speculate | None = None
    """Whether tokens are drafted, and how many at most."""
    session: fields.SessionId | None = None
    """The conversation that this request belongs to. Its KV is pinned after the answer."""
    session_ttl: fields.Ttl | None = None
    """For how many seconds; default: the server's."""
    explain: bool = False
    """Whether the spans of the answer include their text."""

    @model_validator(mode="after")
    def _check_session(self) -> Self:
        if self.session_ttl is not None and self.session is None:
            raise fields.goes_with("session_ttl", "session_ttl goes with session")
        return self


_REUSE = {
    "recompute_strategy": "strategy",
    "recompute_ratio": "ratio",
    **{name: name for name in ("reuse_moved", "heal", "exactness", "speculate")},
}
"""Options of the engine, and the fields of ``kvboost`` that they are."""
_SAMPLING = {
    **{name: name for name in ("top_p", "min_p", "stop", "stop_token_ids", "ignore_eos")},
    **{name: name for name in ("bad_words", "allowed_token_ids", "skip_special_tokens")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "prompt_logprobs")},
    "include_stop": "include_stop_str_in_output",
    "min_new_tokens": "min_tokens",
}
"""The same for fields of the body."""


class StreamOptions(fields.Body):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Whether every chunk says how many tokens there are so far."""
    include_obfuscation: bool | None = None
    """Changes nothing: no chunk is padded."""


class Generation(Formats):
    """The fields that chat and completions share."""

    model: fields.Text
    n: Annotated[int, Field(ge=1, le=fields.MAX_N), fields.WHOLE] | None = None
    max_tokens: fields.MaxTokens | None = None
    temperature: fields.Temperature | None = None
    top_p: fields.Share | None = None
    top_k: fields.TopK | None = None
    min_p: fields.Share | None = None
    repetition_penalty: RepetitionPenalty | None = None
    repeat_penalty: RepetitionPenalty | None = None
    """The same in llama.cpp's words."""
    seed: fields.Seed | None = None
    stop: Stop | None = None
    stop_token_ids: (
        Annotated[list[fields.TokenId], fields.some(fields.MAX_WORDS, least=0)] | None
    ) = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=2**31), fields.WHOLE] | None = None
    bad_words: Annotated[list[fields.SomeText], fields.some(fields.MAX_WORDS, least=0)] | None = (
        None
    )
    allowed_token_ids: fields.TokenIds | None = None
    skip_special_tokens: bool | None = None
    presence_penalty: fields.Penalty | None = None
    frequency_penalty: fields.Penalty | None = None
    logit_bias: fields.LogitBias | None = None
    prompt_logprobs: fields.Logprobs | None = None
    truncate_prompt_tokens: fields.Truncate | None = None
    """How many of the prompt's last tokens are read; -1: as many as the context holds."""
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: fields.ShortText = ""
    kvboost: ReuseOptions = ReuseOptions()
    # Fields that change no answer here.
    user: fields.Text | None = None
    priority: Annotated[int, fields.WHOLE] | None = None
    request_id: fields.ShortText | None = None
    length_penalty: float | None = None
    early_stopping: bool | None = None
    use_beam_search: fields.No | None = None
    spaces_between_special_tokens: bool | None = None
    cache_prompt: bool | None = None
    # Fields that are not supported.
    lora_path: None = None
    structural_tag: None = None

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise fields.goes_with("stream_options", "stream_options goes with stream=true")
        if self.prompt_logprobs is not None and self.stream:
            raise fields.goes_with(
                "prompt_logprobs", "prompt_logprobs does not go with stream=true"
            )
        return self

    def engine_options(self) -> dict[str, Any]:
        """The engine's options, apart from formats; None where a field is not given."""
        bias, penalty = self.logit_bias, self.repetition_penalty
        return {
            **{option: getattr(self, field) for option, field in _SAMPLING.items()},
            **{option: getattr(self.kvboost, field) for option, field in _REUSE.items()},
            "temperature": 1.0 if self.temperature is None else self.temperature,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "repetition_penalty": self.repeat_penalty if penalty is None else penalty,
            "logit_bias": None if bias is None else {int(key): bias[key] for key in bias},
        }

    @property
    def longest_answer(self) -> int | None:
        """The most tokens of an answer; None: the server's default."""
        return self.max_tokens

    @property
    def use(self) -> ToolUse | None:
        """The tools and their choice; None if the request is no conversation."""
        return None

    @property
    def has_continuous_usage(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        options = self.stream_options
        return self.has_continuous_usage or bool(options and options.include_usage)
