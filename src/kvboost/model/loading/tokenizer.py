"""A model's tokenizer and chat template."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kvboost.chat.parser import AnswerParser, OneCall, TextParser
from kvboost.chat.plain import uses_tools, with_tools_as_text
from kvboost.chat.styles import ChatStyle
from kvboost.chat.tool_use import Reasoning, ToolUse, reasoning_in
from kvboost.config import closest
from kvboost.errors import ConfigError, PromptError, StructuredOutputError
from kvboost.model.loading.answer_parser import XML_CALLS, TemplateParser

_END_TOKENS = 64
"""How many tokens of a prompt show whether it has begun the answer."""
_PROBE_NAME = "kvboost_probe"
_PROBE = {
    "type": "function",
    "function": {
        "name": _PROBE_NAME,
        "description": "A tool to see what the template does with it.",
        "parameters": {"type": "object", "properties": {}},
    },
}

_INFILL = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>"),
)
"""The tokens before the text in front, before the text behind, and before the answer: of Qwen,
StarCoder and Granite, DeepSeek, Code Llama, and others."""
ROLES = ("system", "developer", "user", "assistant", "tool")
"""Who may say a message of any conversation."""
_CONTENT = "kvboost-placeholder-for-the-message-of-the-user"


class ModelTokenizer:
    """A transformers tokenizer, reduced to the methods that KVBoost needs."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.hf = tokenizer
        # What transformers does around the fast tokenizer takes longer than decoding a token, and
        # for a long text milliseconds: it asks for the place of each token in the text as well.
        self._fast = self._stock("decode", "_decode")
        self._fast_encoder = self._stock("__call__", "_encode_plus")

    def _stock(self, *methods: str) -> Any:
        """The fast tokenizer below, if ``methods`` are those of transformers."""
        stock = PreTrainedTokenizerFast
        if not isinstance(self.hf, stock):
            return None
        is_stock = all(getattr(type(self.hf), one) is getattr(stock, one) for one in methods)
        return self.hf.backend_tokenizer if is_stock else None

    def __reduce__(self) -> tuple[type[ModelTokenizer], tuple[PreTrainedTokenizerBase]]:
        return ModelTokenizer, (self.hf,)

    def encode(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=True)

    def encode_fragment(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        fast = self._fast_encoder
        if fast is None or fast.truncation or fast.padding or self.hf.split_special_tokens:
            given = self.hf(text, add_special_tokens=add_special_tokens, verbose=False)
            return list(given["input_ids"])
        # The call for several texts lets other threads run meanwhile.
        (found,) = fast.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(found.ids)

    def chat_frame(self) -> tuple[str, str] | None:
        if self.hf.chat_template is None:
            return None
        message = {"role": "user", "content": _CONTENT}
        try:
            said = _in_parts(message) if self._wants_parts else message
            text = self.hf.apply_chat_template([said], add_generation_prompt=True, tokenize=False)
        except TemplateError:
            return None
        before, found, after = str(text).partition(_CONTENT)
        return (before, after) if found else None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if self._fast is not None:
            return str(self._fast.decode(list(ids), skip_special_tokens=skip_special_tokens))
        size = self.size  # rows of images have larger ids
        return str(
            self.hf.decode(
                [token for token in ids if token < size],
                skip_special_tokens=skip_special_tokens,
                clean_up_tokenization_spaces=False,
            )
        )

    @property
    def size(self) -> int:
        """The number of tokens it knows."""
        return len(self.hf)

    @property
    def eos_ids(self) -> frozenset[int]:
        """The token that ends a sequence, if there is one."""
        return frozenset(() if self.hf.eos_token_id is None else [self.hf.eos_token_id])

    def vocabulary(self) -> dict[str, int]:
        """All tokens and their ids."""
        return dict(self.hf.get_vocab())

    def infill(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """The ids of a prompt whose answer stands between two texts."""
        names = next((one for one in _INFILL if self._has_tokens(one)), None)
        if names is None:
            raise PromptError(
                "this model cannot fill in the middle: its tokenizer has no tokens for it, such as "
                f"{', '.join(_INFILL[0])}"
            )
        prefix, suffix, middle = self.hf.convert_tokens_to_ids(list(names))
        return [prefix, *before, suffix, *after, middle]

    def _has_tokens(self, names: Sequence[str]) -> bool:
        vocabulary = self.hf.get_vocab()
        return all(name in vocabulary for name in names)

    def serialized(self) -> str:
        """The tokenizer in the JSON format of the tokenizers library."""
        if not isinstance(self.hf, PreTrainedTokenizerFast):
            raise StructuredOutputError(
                "the format of an answer",
                f"that takes a fast tokenizer, and this model has a {type(self.hf).__name__}",
            )
        backend = copy(self.hf.backend_tokenizer)
        backend.no_padding()
        backend.no_truncation()
        return str(backend.to_str())

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        if self.hf.chat_template is None:
            raise PromptError(
                "this model has no chat template; build the prompt yourself and call generate()"
            )
        messages = [self._in_known_role(message) for message in messages]
        given = dict(options or {})
        self._check_options(given)
        if (tools or uses_tools(messages)) and self._tools_option is None:
            messages, tools = with_tools_as_text(messages, tools), ()
        if self._wants_parts:
            messages = [_in_parts(message) for message in messages]
        if tools and self._tools_option is not None:
            given[self._tools_option] = [dict(tool) for tool in tools]
        try:
            text = self.hf.apply_chat_template(
                messages,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                tokenize=False,
                **given,
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise PromptError(f"the model's chat template refuses this: {error}") from error
        return str(text)

    def _in_known_role(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of ``message``. Most templates print any role, also one that the model has never
        seen. So roles other than ROLES are refused, unless the template names them, as Llama's
        names "ipython". A developer is the system where the template names none."""
        role = message["role"]
        if role == "developer" and not self._names_role(role):
            return {**message, "role": "system"}
        if role in ROLES or (isinstance(role, str) and self._names_role(role)):
            return dict(message)
        guess = closest(role, ROLES) if isinstance(role, str) else None
        hint = f"did you mean {guess!r}? Roles are" if guess else "roles are"
        raise PromptError(
            f"the role {role!r} is unknown; {hint} {', '.join(ROLES)}. If the model was trained "
            "with another one, give generate() the token ids of "
            "engine.tokenizer.apply_chat_template"
        )

    def _names_role(self, role: str) -> bool:
        """Whether the template compares with ``role``, or sets it."""
        named = rf"""role\b[^%}}\n]*?['"]{re.escape(role)}['"]"""
        return re.search(named, self._template or "") is not None

    @cached_property
    def _wants_parts(self) -> bool:
        """Whether the chat template leaves out content that is no list of parts, as templates of
        some models that see do."""
        message = {"role": "user", "content": _CONTENT}
        try:
            if _CONTENT in str(self.hf.apply_chat_template([message], tokenize=False)):
                return False
            text = self.hf.apply_chat_template([_in_parts(message)], tokenize=False)
        except (TemplateError, TypeError, ValueError):
            return False
        return _CONTENT in str(text)

    @cached_property
    def _tools_option(self) -> str | None:
        """Under which name the chat template takes tools; None if it knows none."""
        template = self._template or ""
        for name in ("tools", "xml_tools"):  # SmolLM 3 has the other name
            if name not in template:
                continue
            messages = [{"role": "user", "content": "Hello"}]
            options: dict[str, Any] = {name: [_PROBE]}
            try:
                text = self.hf.apply_chat_template(messages, tokenize=False, **options)
            except (TemplateError, TypeError):
                continue
            if _PROBE_NAME in str(text):
                return name
        return None

    @cached_property
    def _taken_names(self) -> frozenset[str]:
        """The names that mean something else in a call for the chat template."""
        taken = inspect.signature(self.hf.apply_chat_template).parameters
        return frozenset((*taken, "messages", "xml_tools"))

    def _check_options(self, options: Mapping[str, Any]) -> None:
        for name, value in options.items():
            if name in self._taken_names:
                raise ConfigError(
                    f"template_options: {name}={value!r} cannot be given: transformers uses this "
                    "name itself; options are names that the model's chat template uses, such as "
                    "enable_thinking"
                )

    @cached_property
    def _template(self) -> str | None:
        """The chat template, or all of them if there are several."""
        template = self.hf.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template

    @cached_property
    def style(self) -> ChatStyle:
        """The formats in which the model writes reasoning and calls of tools."""
        return ChatStyle.of(self._template)

    @property
    def _response_template(self) -> Mapping[str, Any] | None:
        found: Mapping[str, Any] | None = getattr(self.hf, "response_template", None)
        return XML_CALLS if found is None and self.style.names_parameters else found

    @property
    def writes_special_tokens(self) -> bool:
        """Whether special tokens are part of how the model writes calls and reasoning."""
        return getattr(self.hf, "response_template", None) is not None

    def reasoning_after(self, prompt_ids: Sequence[int]) -> Reasoning:
        """Whether the answer to a prompt may begin with reasoning."""
        return reasoning_in(self._end_of(prompt_ids), self.style)

    def answer_parser(self, prompt_ids: Sequence[int], use: ToolUse) -> AnswerParser | None:
        """The parser that splits an answer into its parts; None if it has only one."""
        parser = self._parser(prompt_ids, use)
        return parser if parser is None or use.parallel else OneCall(parser)

    def _parser(self, prompt_ids: Sequence[int], use: ToolUse) -> AnswerParser | None:
        """Calls that a grammar forces are in a style of ours."""
        style, template = self.style, self._response_template
        if template is not None and not use.is_forced:
            return TemplateParser(template, self._end_of(prompt_ids), use.offered)
        if not use.offered and not style.thinks:
            return None
        return TextParser(
            style.calls if use.offered else None,
            thinks=style.thinks,
            begun=self.reasoning_after(prompt_ids) == "begun",
            names=use.names,
        )

    def _end_of(self, prompt_ids: Sequence[int]) -> str:
        return self.decode(prompt_ids[-_END_TOKENS:], skip_special_tokens=False)


def _in_parts(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message whose text is a part of its content."""
    content = message.get("content")
    if not isinstance(content, str) or not content:
        return dict(message)
    return {**message, "content": [{"type": "text", "text": content}]}
