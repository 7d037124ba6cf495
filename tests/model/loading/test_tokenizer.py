"""Chat templates with tools, and parsers of what models answer."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from kvboost.chat.parser import TextParser, collect
from kvboost.chat.styles import BARE, TAGGED
from kvboost.chat.tool_use import ToolUse
from kvboost.errors import ConfigError, PromptError, StructuredOutputError
from kvboost.model.loading.answer_parser import TemplateParser
from kvboost.model.loading.tokenizer import ModelTokenizer
from kvboost.results import ParsedAnswer, ToolCall
from support.chat_templates import BEGUN, LLAMA, QWEN, SMOLLM, tokenizer_with
from support.tiny import EOS, byte_tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"days": {"type": "integer"}}},
    },
}
USE = ToolUse([WEATHER])
USER = {"role": "user", "content": "Rain?"}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"days": 2}}}
TURNS: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "sunny", "tool_call_id": "1", "name": "weather"},
]


def prompt(template: str | None, *args: Any, **options: Any) -> str:
    tokenizer = ModelTokenizer(tokenizer_with(template))
    return tokenizer.render_chat(*args, **options)


@pytest.mark.parametrize("template", [QWEN, LLAMA, SMOLLM])
def test_a_template_is_given_the_tools(template: str) -> None:
    assert '"name": "weather"' in prompt(template, [USER], tools=[WEATHER])
    assert "weather" not in prompt(template, [USER])


def test_a_template_is_given_calls_and_results() -> None:
    text = prompt(QWEN, TURNS, tools=[WEATHER])
    assert '{"name": "weather", "arguments": {"days": 2}}' in text and "tool:sunny" in text


def test_a_template_without_tools_gets_them_as_text() -> None:
    plain = byte_tokenizer().chat_template
    text = prompt(plain, TURNS, tools=[WEATHER])
    assert text.startswith("s:# Tools") and "<tools>" in text
    assert 'a:<tool_call>\n{"name": "weather", "arguments": {"days": 2}}' in text
    assert "u:<tool_response>\nsunny\n</tool_response>" in text
    assert "# Tools" not in prompt(plain, [USER])


def test_options_reach_the_template() -> None:
    assert prompt(QWEN, [USER], options={"enable_thinking": False}).endswith("</think>\n\n")
    with pytest.raises(ConfigError, match="template_options: tokenize=False cannot be given"):
        prompt(QWEN, [USER], options={"tokenize": False})


GEMMA = """{% for message in messages %}
{%- if message['role'] == 'assistant' %}{% set role = "model" %}{% else %}
{%- set role = message['role'] %}{% endif %}{{ role + ':' + message['content'] }}{% endfor %}"""
IPYTHON = """{% for message in messages %}
{%- if message.role in ["tool", "ipython"] %}{{ 'result:' + message.content }}
{%- else %}{{ message.role + ':' + message.content }}{% endif %}{# "function" #}{% endfor %}"""


@pytest.mark.parametrize(
    ("template", "role", "begins"),
    [
        (QWEN, "system", "system:"),
        (QWEN, "developer", "system:"),
        (IPYTHON.replace("tool", "developer"), "developer", "result:"),
        (IPYTHON, "ipython", "result:"),
        (GEMMA, "model", "model:"),
    ],
)
def test_a_role_is_one_of_everybodys_or_of_the_template(template, role, begins) -> None:
    assert prompt(template, [{"role": role, "content": "Hello"}]).startswith(f"{begins}Hello")


@pytest.mark.parametrize(
    ("template", "role", "said"),
    [
        (QWEN, "bot", r"'bot' is unknown; roles are system, developer, user, assistant, tool"),
        (QWEN, "asistant", "did you mean 'assistant'"),
        (QWEN, "User", "did you mean 'user'"),
        (QWEN, "ipython", r"'ipython' is unknown.*engine\.tokenizer\.apply_chat_template"),
        (IPYTHON, "function", "'function' is unknown"),
        (QWEN, None, "None is unknown"),
        (QWEN, ["user"], "is unknown"),
    ],
)
def test_a_role_that_nobody_knows_is_refused(template, role, said) -> None:
    with pytest.raises(PromptError, match=said):
        prompt(template, [USER, {"role": role, "content": "Hello"}])


def test_what_a_template_cannot_read_is_an_error() -> None:
    with pytest.raises(PromptError, match="the model's chat template refuses this"):
        prompt(LLAMA, [{"role": "user", "content": 3}])


def test_styles() -> None:
    styles = {name: ModelTokenizer(tokenizer_with(t)).style for name, t in
              {"qwen": QWEN, "llama": LLAMA, "none": None}.items()}  # fmt: skip
    assert styles["qwen"].calls is TAGGED and styles["qwen"].thinks
    assert styles["llama"].calls is BARE and not styles["llama"].thinks
    assert styles["none"].calls is TAGGED


def test_answers_of_one_part_need_no_parser() -> None:
    tokenizer = ModelTokenizer(tokenizer_with(LLAMA))
    assert tokenizer.answer_parser([1], ToolUse()) is None
    assert tokenizer.answer_parser([1], ToolUse([WEATHER], "none")) is None
    assert isinstance(tokenizer.answer_parser([1], USE), TextParser)


def test_reasoning_that_the_prompt_began_is_read_as_such() -> None:
    tokenizer = ModelTokenizer(tokenizer_with(BEGUN))
    ids = tokenizer.encode_fragment(tokenizer.render_chat([USER]))
    assert tokenizer.reasoning_after(ids) == "begun"
    parser = tokenizer.answer_parser(ids, ToolUse())
    assert parser is not None
    assert collect([*parser.feed("hm</think>Yes"), *parser.finish()]) == ParsedAnswer("Yes", "hm")


XML = "<tool_call><function= </think>"
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "assistant:",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<eos>",
            "close": "!",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"content": "text"},
    },
}


def read(parser: Any, text: str) -> ParsedAnswer:
    parts = [part for character in text for part in parser.feed(character)]
    return collect([*parts, *parser.finish()])


def test_a_response_template_is_followed() -> None:
    hf = tokenizer_with(QWEN)
    hf.response_template = RESPONSE_TEMPLATE
    tokenizer = ModelTokenizer(hf)
    assert tokenizer.writes_special_tokens
    ids = tokenizer.encode_fragment(tokenizer.render_chat([USER]))
    parser = tokenizer.answer_parser(ids, USE)
    assert isinstance(parser, TemplateParser)
    text = '<think>hm</think>Look:<eos>{"name": "weather", "arguments": {"days": 2}}!'
    call = ToolCall("weather", '{"days": 2}')
    assert read(parser, text) == ParsedAnswer("Look:", "hm", (call,))
    assert isinstance(tokenizer.answer_parser(ids, ToolUse([WEATHER], "required")), TextParser)


def test_a_call_that_cannot_be_read_is_content() -> None:
    hf = tokenizer_with(QWEN)
    hf.response_template = RESPONSE_TEMPLATE
    parser = ModelTokenizer(hf).answer_parser([1], USE)
    assert read(parser, "Look:<eos>{weather}! So").content == "Look:{weather}! So"


def test_calls_in_xml() -> None:
    """The arguments have the types of the tool's schema."""
    tokenizer = ModelTokenizer(tokenizer_with(XML))
    assert not tokenizer.writes_special_tokens
    text = "I look.\n<tool_call>\n<function=weather>\n<parameter=days>\n2\n</parameter>\n" \
           "</function>\n</tool_call>"  # fmt: skip
    found = read(tokenizer.answer_parser([1], USE), text)
    assert found == ParsedAnswer("I look.", "", (ToolCall("weather", '{"days": 2}'),))


def test_a_slow_tokenizer_cannot_be_serialized() -> None:
    class Slow:
        chat_template = None

    with pytest.raises(StructuredOutputError, match=r"takes a fast tokenizer.*Slow"):
        ModelTokenizer(Slow()).serialized()


TEXTS = ["", "Rain?", "two\nlines é 😀 <eos> and more", " blank ", "x" * 5000]


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_encoded_as_transformers_encodes_it(text: str) -> None:
    hf = tokenizer_with(None)
    tokenizer = ModelTokenizer(hf)
    assert tokenizer.encode(text) == hf(text)["input_ids"]
    assert tokenizer.encode_fragment(text) == hf(text, add_special_tokens=False)["input_ids"]


def test_special_tokens_are_added_only_where_they_are_asked_for() -> None:
    hf = deepcopy(tokenizer_with(None))
    hf.backend_tokenizer.post_processor = TemplateProcessing("<eos> $A", None, [("<eos>", EOS)])
    tokenizer = ModelTokenizer(hf)
    assert tokenizer.encode("ab") == [EOS, *tokenizer.encode_fragment("ab")] == hf("ab").input_ids


def test_a_tokenizer_that_truncates_does_not_cut_prompts() -> None:
    hf = deepcopy(tokenizer_with(None))
    hf.backend_tokenizer.enable_truncation(4)
    hf.backend_tokenizer.enable_padding(length=9)
    assert len(ModelTokenizer(hf).encode("12345678")) == 8


def test_a_tokenizer_that_splits_special_tokens_goes_on_doing_so() -> None:
    hf = deepcopy(tokenizer_with(None))
    hf.split_special_tokens = True
    assert ModelTokenizer(hf).encode("<eos>") == hf("<eos>").input_ids != [EOS]


def test_a_tokenizer_with_a_way_of_its_own_is_asked() -> None:
    class Own(type(tokenizer_with(None))):  # type: ignore[misc]
        def _encode_plus(self, text: Any, *args: Any, **options: Any) -> Any:
            return super()._encode_plus(text.upper(), *args, **options)

    hf = deepcopy(tokenizer_with(None))
    hf.__class__ = Own
    assert ModelTokenizer(hf).encode("ab") == hf("AB").input_ids == ModelTokenizer(hf).encode("AB")


def test_tools_become_parts_where_a_template_shows_nothing_else() -> None:
    hf = deepcopy(tokenizer_with(None))
    hf.chat_template = (  # as that of SmolVLM: it knows no tools either
        "{% for m in messages %}{{ m.role }}:{% for part in m.content %}"
        "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}\n{% endfor %}"
    )
    tool = {"type": "function", "function": {"name": "weather"}}
    for content in ("Rain?", [{"type": "text", "text": "Rain?"}]):
        said = [{"role": "user", "content": content}]
        shown = ModelTokenizer(hf).render_chat(said, tools=[tool])
        assert "# Tools" in shown and '"name": "weather"' in shown and "user:Rain?" in shown
