"""The bodies of Ollama's API. Clients send empty strings and lists for what they do not want."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, PrivateAttr, Tag, model_validator

from kvboost.chat.tool_use import ToolUse
from kvboost.serve.schema import chat, fields
from kvboost.serve.schema.formats import JsonSchema
from kvboost.serve.schema.generation import RepetitionPenalty, ReuseOptions, Stop
from kvboost.serve.schema.requests import ChatRequest, CompletionRequest

DEFAULT_TEMPERATURE = 0.8  # Ollama's


def _empty(said: str) -> Any:
    """A field that clients may send, but only empty."""

    def check(value: Any) -> Any:
        if value:
            raise fields.unsupported(said)
        return value

    return AfterValidator(check)


_NONE_IN_IT: Any = Field(json_schema_extra={"maxItems": 0})
NoImages = Annotated[list[Any], _empty("images are not supported; send text only"), _NONE_IN_IT]

NoContext = Annotated[
    list[Any], _empty("is not supported; send the conversation to /api/chat"), _NONE_IN_IT
]

NoTemplate = Annotated[
    str,
    _empty("is not supported: the model has its own; to write the whole prompt, send raw=true"),
    Field(json_schema_extra={"maxLength": 0}),
]

Number = Annotated[int, fields.WHOLE]


class OllamaFunction(fields.Body):
    name: chat.ToolName
    arguments: chat.Arguments = Field(default_factory=dict)
    index: Number | None = None


class OllamaCall(fields.Body):
    type: Literal["function"] | None = None
    id: fields.ShortText | None = None
    function: OllamaFunction


_ROLES = {
    **dict.fromkeys(("thinking", "tool_calls"), "assistant"),
    **dict.fromkeys(("tool_name", "tool_call_id"), "tool"),
}


class OllamaMessage(fields.Body):
    """``images`` come first: the error about a message names the first wrong field."""

    images: NoImages | None = None
    role: Literal["system", "user", "assistant", "tool"]
    content: fields.Text = ""
    thinking: fields.Text | None = None
    tool_calls: Annotated[list[OllamaCall], fields.some(fields.MAX_CALLS, least=0)] | None = None
    tool_name: fields.ShortText | None = None
    tool_call_id: fields.ShortText | None = None

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        fields.check_role(self, _ROLES)
        return self

    def for_chat(self) -> chat.Message:
        calls = [
            chat.Call(
                id=call.id or f"call_{number}",
                function=chat.CalledFunction.of(call.function.name, call.function.arguments),
            )
            for number, call in enumerate(self.tool_calls or ())
        ]
        return chat.Message(
            role=self.role,
            content=self.content,
            reasoning_content=self.thinking or None,
            tool_calls=calls or None,
            tool_call_id=self.tool_call_id,
            name=self.tool_name,
        )


class Sampling(fields.Body):
    """The options that requests of all APIs have."""

    temperature: fields.Temperature = DEFAULT_TEMPERATURE
    top_k: fields.TopK | None = None
    top_p: fields.Share | None = None
    min_p: fields.Share | None = None
    stop: Stop | None = None
    repeat_penalty: RepetitionPenalty | None = None
    presence_penalty: fields.Penalty | None = None
    frequency_penalty: fields.Penalty | None = None


class Options(Sampling):
    """Those that are missing here, such as ``mirostat``, are unknown fields."""

    seed: fields.Seed | None = None
    """-1 chooses one."""
    num_predict: Annotated[int, Field(ge=-2, lt=2**31), fields.WHOLE] | None = None
    """-1, -2 and 0: as many tokens as the context holds."""
    # Options that change no answer here: the model is loaded, and has its whole context.
    num_ctx: Number | None = None
    num_keep: Number | None = None
    num_batch: Number | None = None
    num_gpu: Number | None = None
    main_gpu: Number | None = None
    num_thread: Number | None = None
    use_mmap: bool | None = None

    def max_tokens(self, context: int | None) -> int | None:
        """The longest answer of a model with this ``context``; None: the server's default."""
        return self.num_predict if self.num_predict is None or self.num_predict > 0 else context


class Kept(fields.Body):
    """A request that says how long the model stays loaded. Here it always does."""

    model: fields.Text
    keep_alive: fields.ShortText | float | None = None
    options: Options = Options()


class Asked(Kept):
    """The fields that chat and generate share."""

    stream: bool = True
    format: Literal["", "json"] | JsonSchema | None = None
    think: bool | Literal["low", "medium", "high", "max"] | None = None
    logprobs: bool | None = None
    top_logprobs: fields.Logprobs | None = None
    """Changes nothing without ``logprobs``."""
    _use: ToolUse = PrivateAttr(default=ToolUse())
    # Not in Ollama's API.
    cache_salt: fields.ShortText = ""
    kvboost: ReuseOptions = ReuseOptions()

    def chat_request(
        self, model: str, messages: list[chat.Message], context: int | None
    ) -> ChatRequest:
        return ChatRequest.translated(
            self._use,
            messages=messages,
            continue_final_message=messages[-1].role == "assistant" and not messages[-1].tool_calls,
            enable_thinking=None if self.think is None else self.think is not False,
            reasoning_effort=self.think if isinstance(self.think, str) else None,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs if self.logprobs else None,
            max_tokens=self.options.max_tokens(context),
            **self.shared(model),
        )

    def shared(self, model: str) -> dict[str, Any]:
        """The fields that the requests of both APIs of OpenAI's have."""
        schema = {"type": "object"} if self.format == "json" else self.format
        return {
            **{name: getattr(self.options, name) for name in Sampling.model_fields},
            "model": model,
            "seed": None if self.options.seed == -1 else self.options.seed,
            "guided_json": None if schema == "" else schema,
            "cache_salt": self.cache_salt,
            "kvboost": self.kvboost,
        }


class OllamaChat(Asked):
    """A request to ``/api/chat``. Without messages it answers at once."""

    messages: Annotated[list[OllamaMessage], fields.some(fields.MAX_MESSAGES, least=0)] = Field(
        default_factory=list
    )
    tools: Annotated[list[chat.Tool], fields.some(fields.MAX_TOOLS, least=0)] | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        self._use = chat.make_use(self.tools, None, None)
        return self

    def for_chat(self, model: str, context: int | None) -> ChatRequest:
        messages = [message.for_chat() for message in self.messages]
        return self.chat_request(model, messages, context)


class OllamaGenerate(Asked):
    """A request to ``/api/generate``. Without a prompt it answers at once."""

    template: NoTemplate | None = None
    images: NoImages | None = None
    context: NoContext | None = None
    prompt: fields.Text = ""
    suffix: fields.Text = ""
    system: fields.Text = ""
    raw: bool = False

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.system and self.is_completion:
            other = "raw" if self.raw else "suffix"
            raise fields.goes_with("system", f"system does not go with {other}")
        return self

    @property
    def is_completion(self) -> bool:
        """Whether the prompt goes to the model without the chat template."""
        return self.raw or bool(self.suffix)

    def for_chat(self, model: str, context: int | None) -> ChatRequest:
        system = [chat.Message(role="system", content=self.system)] if self.system else []
        messages = [*system, chat.Message(role="user", content=self.prompt)]
        return self.chat_request(model, messages, context)

    def for_completion(self, model: str, max_tokens: int) -> CompletionRequest:
        return CompletionRequest(
            prompt=self.prompt,
            suffix=self.suffix or None,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            max_tokens=max_tokens,
            **self.shared(model),
        )


class ShowRequest(fields.Body):
    """The name of a model that is to be described."""

    model: fields.Text
    verbose: bool | None = None


class EmbedRequest(Kept):
    input: Annotated[
        Annotated[fields.Text, Tag("as text")]
        | Annotated[list[fields.SomeText], fields.some(fields.MAX_INPUTS, least=0), Tag("as list")],
        fields.one_of(fields.text_or_list, f"a string or a list of up to {fields.MAX_INPUTS}"),
    ] = ""
    truncate: bool = True
    """Whether an input that is too long is cut; else it is refused."""
    dimensions: fields.MaxTokens | None = None
    """Only the model's own number: its vectors cannot be shortened."""

    def inputs(self) -> list[str]:
        """The texts to embed; none if the input is empty."""
        given = [self.input] if isinstance(self.input, str) else self.input
        return [text for text in given if text]


class LegacyEmbedRequest(Kept):
    """A request to ``/api/embeddings``."""

    prompt: fields.SomeText
