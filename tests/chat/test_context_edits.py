"""Edits of conversations, counted with a chat template and a tokenizer of bytes."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from kvboost import AppliedEdit, ConfigError, Conversation, KVBoost
from kvboost.chat.context_edits import CLEARED, THINKING, TOOL_USES, edit_context
from kvboost.model.loading.tokenizer import ModelTokenizer
from support.chat_templates import QWEN, tokenizer_with
from support.tiny import tiny_model

TEMPLATE = QWEN.replace(
    "'assistant:' + (message.content or '')",
    "'assistant:' + (message.reasoning_content or '') + (message.content or '')",
)
"""Shows the reasoning of all turns."""
LONG = "It rains in Rome, and the river is high. "


def use(name: str, number: int, result: str = LONG) -> list[dict[str, Any]]:
    """A call with its reasoning, and the result."""
    function = {"name": name, "arguments": {"city": f"Rome {number}"}}
    call = {"id": f"c{number}", "type": "function", "function": function}
    return [
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": f"Let me look ({number}).",
            "tool_calls": [call],
        },
        {"role": "tool", "tool_call_id": f"c{number}", "content": f"{number}: {result}"},
    ]


ASK = {"role": "user", "content": "Rain in Rome?"}
MESSAGES = [
    *[ASK, *use("weather", 1), *use("map", 2)],
    *[{"role": "assistant", "content": "Yes."}, ASK, *use("weather", 3), *use("weather", 4)],
]
TOKENIZER = ModelTokenizer(tokenizer_with(TEMPLATE))


def count(conversation: Conversation) -> int:
    return len(TOKENIZER.encode_fragment(TOKENIZER.render_chat(conversation.messages)))


def edited(
    *edits: dict[str, Any], messages: list[dict[str, Any]] = MESSAGES
) -> tuple[list[dict[str, Any]], tuple[AppliedEdit, ...]]:
    before, given = deepcopy(messages), Conversation(messages)
    found, applied = edit_context(given, {"edits": list(edits)}, count)
    assert messages == before and len(found.messages) == len(messages)
    assert count(given) - count(found) == sum(one.cleared_input_tokens for one in applied)
    return list(found.messages), applied


def tools(**fields: Any) -> dict[str, Any]:
    """An edit that clears all results at once, unless ``fields`` say otherwise."""
    trigger, keep = {"type": "input_tokens", "value": 1}, {"type": "tool_uses", "value": 0}
    return {"type": TOOL_USES, "trigger": trigger, "keep": keep, **fields}


def cleared(messages: list[dict[str, Any]]) -> list[int]:
    """The numbers of the results that are gone."""
    results = [one["content"] for one in messages if one["role"] == "tool"]
    return [number for number, text in enumerate(results, 1) if text == CLEARED]


def reasons(messages: list[dict[str, Any]]) -> list[int]:
    """The places of messages that have reasoning."""
    return [at for at, one in enumerate(messages) if "reasoning_content" in one]


def test_the_oldest_results_are_cleared_and_the_rest_is_kept() -> None:
    messages, (applied,) = edited(tools(keep={"type": "tool_uses", "value": 1}))
    assert cleared(messages) == [1, 2, 3]
    saved = 3 * (len(f"1: {LONG}") - len(CLEARED))
    assert applied == AppliedEdit(TOOL_USES, saved, cleared_tool_uses=3)
    others = [one for one in messages if one["role"] != "tool"]
    assert others == [one for one in MESSAGES if one["role"] != "tool"]


def test_three_uses_are_kept_unless_told_otherwise() -> None:
    edit = tools()
    del edit["keep"]
    assert cleared(edited(edit)[0]) == [1]


def test_nothing_is_cleared_below_100_000_tokens_unless_told_otherwise() -> None:
    edit = tools()
    del edit["trigger"]
    assert edited(edit) == (MESSAGES, ())
    many = [*MESSAGES, {"role": "user", "content": "x" * 100_000}]
    assert cleared(edited(edit, messages=many)[0]) == [1, 2, 3, 4]


@pytest.mark.parametrize("kind", ["input_tokens", "tool_uses"])
def test_a_trigger_must_be_exceeded(kind: str) -> None:
    there = {"input_tokens": count(Conversation(MESSAGES)), "tool_uses": 4}[kind]
    assert edited(tools(trigger={"type": kind, "value": there})) == (MESSAGES, ())
    assert edited(tools(trigger={"type": kind, "value": there - 1}))[1] != ()


def test_nothing_is_cleared_that_saves_too_little() -> None:
    (applied,) = edited(tools())[1]
    saved = applied.cleared_input_tokens
    enough = {"type": "input_tokens", "value": saved}
    assert edited(tools(clear_at_least=enough))[1] == (applied,)
    more = {"type": "input_tokens", "value": saved + 1}
    assert edited(tools(clear_at_least=more)) == (MESSAGES, ())


def test_excluded_tools_keep_their_results() -> None:
    messages, _ = edited(tools(exclude_tools=["weather"], clear_tool_inputs=True))
    assert cleared(messages) == [2]
    assert arguments(messages) == [{"city": "Rome 1"}, {}, {"city": "Rome 3"}, {"city": "Rome 4"}]


@pytest.mark.parametrize(
    ("chosen", "emptied"), [(True, [1, 2, 3]), (False, []), (["map"], [2]), ([], [])]
)
def test_inputs_of_cleared_calls_are_emptied_if_wanted(chosen: Any, emptied: list[int]) -> None:
    keep = {"type": "tool_uses", "value": 1}
    messages, (applied,) = edited(tools(keep=keep, clear_tool_inputs=chosen))
    assert [number for number, one in enumerate(arguments(messages), 1) if not one] == emptied
    assert applied.cleared_tool_uses == 3


def arguments(messages: list[dict[str, Any]]) -> list[Any]:
    return [call["function"]["arguments"] for one in messages for call in one.get("tool_calls", ())]


def test_short_results_stay_and_are_not_counted() -> None:
    messages = [ASK, *use("weather", 1, "ok"), *use("weather", 2)]
    changed, (applied,) = edited(tools(), messages=messages)
    assert cleared(changed) == [2] and applied.cleared_tool_uses == 1
    assert edited(tools(), messages=changed) == (changed, ())


def test_results_of_parallel_calls_belong_to_the_call_with_their_id() -> None:
    (first, one), (second, two) = use("weather", 1), use("map", 2)
    both = {**first, "tool_calls": [*first["tool_calls"], *second["tool_calls"]]}
    messages, _ = edited(tools(exclude_tools=["map"]), messages=[ASK, both, two, one])
    assert cleared(messages) == [2]
    for result in (one, two):  # without ids, the order counts
        del result["tool_call_id"]
    messages, _ = edited(tools(exclude_tools=["map"]), messages=[ASK, both, one, two])
    assert cleared(messages) == [1]


def test_calls_and_results_in_other_forms() -> None:
    call = {"name": "weather", "arguments": '{"city": "Rome"}'}
    parts = [{"type": "text", "text": LONG}]
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": parts},
        {"role": "tool", "content": LONG, "name": "map"},
    ]
    found, (applied,) = edit_context(
        Conversation(messages),
        {"edits": [tools(clear_tool_inputs=True)]},
        lambda one: len(str(one.messages)),
    )
    assert found.messages[0]["tool_calls"] == [{"name": "weather", "arguments": "{}"}]
    assert found.messages[1]["content"] == [{"type": "text", "text": CLEARED}]
    assert found.messages[2]["content"] == CLEARED
    assert applied.cleared_tool_uses == 2


def test_the_reasoning_of_older_turns_is_removed() -> None:
    """A turn goes from one message of the user to the next, with all its calls."""
    assert reasons(MESSAGES) == [1, 3, 7, 9]
    messages, (applied,) = edited({"type": THINKING})
    assert reasons(messages) == [7, 9]
    saved = 2 * len("Let me look (1).")
    assert applied == AppliedEdit(THINKING, saved, cleared_thinking_turns=1)
    assert messages[1]["tool_calls"] == MESSAGES[1]["tool_calls"]


@pytest.mark.parametrize(
    "keep", ["all", {"type": "all"}, {"type": "thinking_turns", "value": 2}], ids=str
)
def test_reasoning_may_be_kept(keep: Any) -> None:
    assert edited({"type": THINKING, "keep": keep}) == (MESSAGES, ())


def test_turns_without_reasoning_do_not_count() -> None:
    plain = [{"role": "assistant", "content": "Yes."}, ASK]
    messages = [ASK, *use("weather", 1), *plain, *plain, *plain]
    assert edited({"type": THINKING}, messages=messages) == (messages, ())


def test_tools_are_cleared_after_reasoning() -> None:
    tokens = count(Conversation(MESSAGES))
    after_thinking = {"type": "input_tokens", "value": tokens - 1}
    _, applied = edited({"type": THINKING}, tools(trigger=after_thinking))
    assert [one.type for one in applied] == [THINKING]
    _, applied = edited({"type": THINKING}, tools())
    assert [one.type for one in applied] == [THINKING, TOOL_USES]


WRONG: dict[str, tuple[Any, str]] = {
    "no object": ([], "context_management=[] must be an object; give {'edits': [...]}"),
    "unknown field": (
        {"edit": []},
        "context_management: edit=[] is no known field; did you mean 'edits'?",
    ),
    "no list": (
        {"edits": 3},
        "context_management: edits=3 must be a list of edits, such as [{'type'",
    ),
    "no edit": ({"edits": [7]}, "edits[0]=7 is no edit that KVBoost knows; use {'type': 'clear_"),
    "another edit": (
        {"edits": [{"type": "compact_20260112"}]},
        "edits[0].type='compact_20260112' is no edit that KVBoost knows; use {'type': 'clear_tool_",
    ),
    "field of an edit": (
        {"edits": [{"type": THINKING, "kep": 1}]},
        "edits[0].kep=1 is no known field; did you mean 'keep'? The fields are type, keep",
    ),
    "no turns": (
        {"edits": [{"type": THINKING, "keep": {"type": "thinking_turns", "value": 0}}]},
        "edits[0].keep.value=0 must be a whole number of at least 1; give {'type': 'thinking",
    ),
    "another word": (
        {"edits": [{"type": THINKING, "keep": "some"}]},
        "edits[0].keep='some' must be {'type': 'thinking_turns', 'value': 1} or 'all'",
    ),
    "type of an amount": (
        {"edits": [tools(trigger={"type": "turns", "value": 1})]},
        "edits[0].trigger.type='turns' must be 'input_tokens' or 'tool_uses'",
    ),
    "half a number": (
        {"edits": [tools(keep={"type": "tool_uses", "value": 1.5})]},
        "edits[0].keep.value=1.5 must be a whole number of at least 0",
    ),
    "no value": (
        {"edits": [tools(clear_at_least={"type": "input_tokens"})]},
        "edits[0].clear_at_least.value=None must be a whole number of at least 0",
    ),
    "true is no number": (
        {"edits": [tools(keep={"type": "tool_uses", "value": True})]},
        "edits[0].keep.value=True must be a whole number",
    ),
    "names": (
        {"edits": [tools(exclude_tools="map")]},
        "edits[0].exclude_tools='map' must be a list of names of tools",
    ),
    "inputs": (
        {"edits": [tools(clear_tool_inputs=1)]},
        "edits[0].clear_tool_inputs=1 must be true, false or a list of names of tools",
    ),
    "order": (
        {"edits": [{"type": TOOL_USES}, {"type": THINKING}]},
        f"has them in the wrong order; put {THINKING} first",
    ),
    "twice": ({"edits": [{"type": THINKING}] * 2}, "has two edits of one type; give each type"),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_say_what_is_allowed(case: str) -> None:
    given, said = WRONG[case]
    with pytest.raises(ConfigError) as raised:
        edit_context(Conversation(MESSAGES), given, count)
    assert said in str(raised.value) and str(raised.value).startswith("context_management")


def test_what_is_none_is_not_given() -> None:
    edit = {"type": TOOL_USES, "trigger": None, "keep": None, "clear_tool_inputs": None}
    for given in (None, {}, {"edits": None}, {"edits": [edit]}):
        assert edit_context(Conversation(MESSAGES), given, count) == (Conversation(MESSAGES), ())


def test_the_engine_reads_the_edited_conversation() -> None:
    model = tiny_model("llama", max_position_embeddings=2048)
    tokenizer, options = tokenizer_with(TEMPLATE), {"chunk_size": 16, "reuse_moved": "always"}
    with KVBoost.from_model(model, tokenizer, **options) as engine:
        whole = engine.chat(MESSAGES, 2)
        kept = {"type": "tool_uses", "value": 1}
        edits = {"edits": [{"type": THINKING}, tools(keep=kept)]}
        edited = engine.chat(MESSAGES, 2, context_management=edits)
        with pytest.raises(ConfigError, match="is no edit"):
            engine.chat(MESSAGES, 2, context_management={"edits": [{}]})
    assert whole.applied_edits == ()
    assert [one.type for one in edited.applied_edits] == [THINKING, TOOL_USES]
    saved = sum(one.cleared_input_tokens for one in edited.applied_edits)
    assert edited.prompt_tokens == whole.prompt_tokens - saved
    assert edited.moved_tokens > 0.3 * edited.prompt_tokens
