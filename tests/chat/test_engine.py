"""``engine.chat`` with tools, formats and reasoning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvboost import Conversation, KVBoost, PromptError, StructuredOutputError
from support.chat_templates import BEGUN, QWEN, tokenizer_with
from support.tiny import tiny_model

ASK = [{"role": "user", "content": "Rain in Rome?"}]
NOW: dict[str, Any] = {"type": "function", "function": {"name": "now"}}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["days"],
            "additionalProperties": False,
        },
    },
}
QUIET = {"enable_thinking": False}


@pytest.fixture(scope="module")
def engine() -> Iterator[KVBoost]:
    model = tiny_model("llama", max_position_embeddings=2048)
    with KVBoost.from_model(model, tokenizer_with(QWEN), chunk_size=16) as engine:
        yield engine


def test_a_named_tool_is_called(engine: KVBoost) -> None:
    answer = engine.chat(
        ASK, 200, tools=[NOW, WEATHER], tool_choice="weather", template_options=QUIET
    )
    (call,) = answer.tool_calls
    assert call.name == "weather" and 1 <= json.loads(call.arguments)["days"] <= 9
    assert answer.content == "" and answer.output_text.startswith("<tool_call>")


def test_results_of_tools_continue_the_conversation(engine: KVBoost) -> None:
    tools, exact = [WEATHER], {"mode": "prefix_cache", "template_options": QUIET}
    first = engine.chat(ASK, 200, tools=tools, tool_choice="required", **exact)
    calls = [
        {"id": "1", "type": "function", "function": {"name": call.name,
         "arguments": json.loads(call.arguments)}} for call in first.tool_calls
    ]  # fmt: skip
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    turns = [*ASK, said, {"role": "tool", "content": "sunny", "tool_call_id": "1"}]
    second = engine.chat(turns, 4, tools=tools, **exact)
    assert second.exact_tokens > 100  # the tools and the question were not read again
    assert "tool:sunny" in engine.decode(engine.encode(Conversation(turns, tools)))


def test_a_chat_counts_its_tokenization(engine: KVBoost) -> None:
    timings = engine.chat(ASK, 2).timings
    phases = sum(
        value for name, value in vars(timings).items() if name not in ("ttft_ms", "total_ms")
    )
    assert timings.tokenize_ms > 0 and phases == pytest.approx(timings.total_ms)


def test_reasoning_and_content_are_apart() -> None:
    model = tiny_model("llama", max_position_embeddings=1024)
    with KVBoost.from_model(model, tokenizer_with(BEGUN)) as engine:
        answer = engine.chat(ASK, 8, choice=["yes"])
        assert answer.content == "" and answer.parsed is not None and answer.parsed.reasoning


def test_a_format_follows_reasoning_only_if_there_may_be_some(engine: KVBoost) -> None:
    """With thinking off, the first token is forced."""
    answer = engine.chat(ASK, 8, choice=["yes"], template_options=QUIET)
    assert answer.content == answer.output_text == "yes"


def test_one_call_ends_the_answer(engine: KVBoost) -> None:
    from kvboost.chat.tool_use import ToolUse

    ids = engine.encode(Conversation(ASK, [NOW]))
    single = engine.answer_options(ids, ToolUse([NOW], parallel=False), {"stop": "x"})
    assert single == {"stop": ["x", "</tool_call>"]}


def test_without_tools_and_formats_a_prompt_is_not_looked_at(
    engine: KVBoost, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvboost.chat.tool_use import ToolUse

    def reasoning_after(_: list[int]) -> str:
        raise AssertionError("the end of the prompt was decoded")

    monkeypatch.setattr(engine.model.tokenizer, "reasoning_after", reasoning_after)
    assert engine.answer_options([1, 2], ToolUse([]), {"temperature": 0}) == {"temperature": 0}
    with pytest.raises(AssertionError, match="decoded"):
        engine.answer_options([1, 2], ToolUse([]), {"choice": ["yes"]})


def test_mistakes_are_named(engine: KVBoost) -> None:
    with pytest.raises(PromptError, match="give text to generate"):
        engine.chat("hello")  # type: ignore[arg-type]
    with pytest.raises(PromptError, match="a conversation has chat messages"):
        engine.encode(Conversation("hello"))  # type: ignore[arg-type]
    strict = {"name": "f", "strict": True, "parameters": {"not": {}}}
    with pytest.raises(StructuredOutputError, match=r'tools cannot be enforced: .*"not"'):
        engine.chat(ASK, 8, tools=[{"type": "function", "function": strict}])
