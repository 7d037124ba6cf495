"""What clients may send. A field that is not here, or here as None alone, is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError
from typing_extensions import Self

MAX_N = 8
MAX_PROMPTS = 32
MAX_DOCUMENTS = 256
MAX_STOPS = 4
MAX_SEED = 2**63 - 1
"""Of a generator; what lies beyond begins again."""


def _unicode(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} is half of a surrogate pair") from None
    return text


def either(said: str) -> WrapValidator:
    """For unions: says what is allowed, instead of what each branch has against a value."""

    def check(value: Any, inner: ValidatorFunctionWrapHandler) -> Any:
        try:
            return inner(value)
        except ValidationError as error:
            problems = error.errors(include_url=False, include_context=False, include_input=False)
            for problem in problems:
                if problem["type"] in ("value_error", "extra_forbidden"):
                    raise
            raise PydanticCustomError("either", "must be {said}", {"said": said}) from None

    return WrapValidator(check)


def _whole(value: Any) -> Any:
    """JSON knows one kind of number: 1.0 is a whole one."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


WHOLE = BeforeValidator(_whole)
Text = Annotated[str, AfterValidator(_unicode)]
SomeText = Annotated[str, Field(min_length=1), AfterValidator(_unicode)]
Salt = Annotated[str, Field(max_length=512), AfterValidator(_unicode)]
TOKEN_ID = "Token id"
BIASED_ID = r"^[0-9]{1,9}$"
TokenId = Annotated[int, Field(ge=0, lt=2**31, title=TOKEN_ID), WHOLE]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]
Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
LogitBias = Annotated[
    dict[
        Annotated[str, Field(pattern=BIASED_ID)],
        Annotated[float, Field(ge=-100.0, le=100.0)],
    ],
    Field(max_length=1024, json_schema_extra={"additionalProperties": False}),
]
MaxTokens = Annotated[int, Field(ge=1, lt=2**31), WHOLE]


def _never(value: bool) -> bool:
    if value:
        raise PydanticCustomError("unsupported", "true is not supported by this server")
    return value


No = Annotated[bool, AfterValidator(_never), Field(json_schema_extra={"const": False})]
"""A switch that may be named but not turned on."""


def goes_with(param: str, message: str) -> PydanticCustomError:
    """A field that is fine alone but not beside another."""
    return PydanticCustomError("goes_with", message, {"param": param})


def _needs(field: str, kind: str, other: str) -> dict[str, Any]:
    """JSON Schema for: ``field`` goes with ``other`` being true."""
    return {
        "if": {"properties": {field: {"type": kind}}, "required": [field]},
        "then": {"properties": {other: {"const": True}}, "required": [other]},
    }


class Body(BaseModel):
    """What we do not know we refuse, and nothing is taken for what it is not."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ReuseOptions(Body):
    """How this request reuses what was read; by default as the server does."""

    mode: Literal["baseline", "prefix_cache", "chunk_kv_reuse"] | None = None
    strategy: Literal["auto", "query", "cacheblend", "selective", "none"] | None = None
    ratio: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    explain: bool = False
    """Whether the spans of the answer come with their text."""


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: No | None = None


class Generation(Body):
    """What chat and completions have in common."""

    model: Text
    n: Annotated[int, Field(ge=1, le=MAX_N), WHOLE] | None = None
    max_tokens: MaxTokens | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    # Any whole number: a limit of 64 bits is one that readers who hold it in a double go past.
    seed: Annotated[int, WHOLE] | None = None
    stop: Annotated[
        SomeText | Annotated[list[SomeText], Field(max_length=MAX_STOPS)] | None,
        either(f"a string that is not empty, or up to {MAX_STOPS}"),
    ] = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: LogitBias | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Text | None = None
    cache_salt: Salt = ""
    kvboost: ReuseOptions = ReuseOptions()

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise goes_with("stream_options", "stream_options goes with stream=true")
        return self


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Text | Annotated[list[TextPart], Field(min_length=1)],
        either("a string or a list of parts such as {'type': 'text', 'text': ...}"),
    ]
    name: None = None
    refusal: None = None
    audio: None = None
    annotations: None = None
    function_call: None = None
    tool_calls: None = None

    def for_template(self) -> dict[str, str]:
        """Templates know no developer, and text in one piece; parts become its lines."""
        content = self.content
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        return {"role": "system" if self.role == "developer" else self.role, "content": content}


class TextFormat(Body):
    type: Literal["text"]


class ChatRequest(Generation):
    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [
                _needs("stream_options", "object", "stream"),
                _needs("top_logprobs", "integer", "logprobs"),
            ]
        }
    )

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    response_format: TextFormat | None = None
    store: No | None = None
    metadata: dict[Text, Text] | None = None
    audio: None = None
    function_call: None = None
    functions: None = None
    modalities: None = None
    moderation: None = None
    parallel_tool_calls: None = None
    prediction: None = None
    prompt_cache_key: None = None
    prompt_cache_options: None = None
    prompt_cache_retention: None = None
    reasoning_effort: None = None
    safety_identifier: None = None
    service_tier: None = None
    tool_choice: None = None
    tools: None = None
    verbosity: None = None
    web_search_options: None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise goes_with("top_logprobs", "top_logprobs goes with logprobs=true")
        return self


_NOTHING: dict[str, Any] = {"type": "null"}
_BEST_OF_IS_N: dict[str, Any] = {
    "anyOf": [
        {"properties": {"best_of": _NOTHING}},
        {"properties": {"best_of": {"const": 1}, "n": {"enum": [None, 1]}}},
        *(
            {"properties": {"best_of": {"const": n}, "n": {"const": n}}, "required": ["n"]}
            for n in range(2, MAX_N + 1)
        ),
    ]
}
_ECHO_ALONE: dict[str, Any] = {
    "anyOf": [
        {"properties": {"echo": {"enum": [None, False]}}},
        {"properties": {"logprobs": _NOTHING}},
    ]
}


class CompletionRequest(Generation):
    model_config = ConfigDict(
        json_schema_extra={
            "allOf": [_needs("stream_options", "object", "stream"), _BEST_OF_IS_N, _ECHO_ALONE]
        }
    )

    prompt: Annotated[
        SomeText
        | TokenIds
        | Annotated[list[SomeText], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_PROMPTS)],
        either(f"a string, token ids, or up to {MAX_PROMPTS} of either; none of them empty"),
    ]
    logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_N), WHOLE] | None = None
    suffix: None = None

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise goes_with("best_of", "best_of must be n: this server gives every answer it makes")
        if self.echo and self.logprobs is not None:
            raise goes_with("echo", "echo does not go with logprobs: of a prompt there are none")
        return self

    def prompts(self) -> Sequence[str | list[int]]:
        """One or several, as several."""
        match self.prompt:
            case str() | [int(), *_]:
                return [self.prompt]  # type: ignore[list-item]
            case _:
                return self.prompt  # type: ignore[return-value]


class WarmRequest(Body):
    """Documents to be read before anyone asks about them."""

    documents: Annotated[list[SomeText], Field(min_length=1, max_length=MAX_DOCUMENTS)]
    header: Text | None = None
    """What stands before each; by default the beginning of a user's first message."""
    cache_salt: Salt = ""
    tenant: Text | None = None
    """Whose they are: the name of a key. By default the caller's own."""


class ChatPlan(ChatRequest):
    """A chat request that is not to be answered."""

    model: Text | None = None  # type: ignore[assignment]


class CompletionPlan(CompletionRequest):
    """A completion request, or a prompt alone, that is not to be answered."""

    model: Text | None = None  # type: ignore[assignment]
    prompt: Annotated[SomeText | TokenIds, either("one prompt: a string or token ids, not empty")]


def _plan_kind(body: object) -> str:
    has_messages = isinstance(body, ChatPlan) or (isinstance(body, dict) and "messages" in body)
    return "chat" if has_messages else "completion"


PlanRequest = Annotated[
    Annotated[ChatPlan, Tag("chat")] | Annotated[CompletionPlan, Tag("completion")],
    Discriminator(_plan_kind),
]


class ForgetText(Body):
    """A text, whoever read it and wherever it stood."""

    text: SomeText


class ForgetSalt(Body):
    """Everything that was read under a salt."""

    cache_salt: Salt
    tenant: Text | None = None
    """Whose salt: the name of a key. By default the caller's own."""


def _forget_kind(body: object) -> str:
    has_salt = isinstance(body, ForgetSalt) or (isinstance(body, dict) and "cache_salt" in body)
    return "salt" if has_salt else "text"


ForgetRequest = Annotated[
    Annotated[ForgetText, Tag("text")] | Annotated[ForgetSalt, Tag("salt")],
    Discriminator(_forget_kind),
]
