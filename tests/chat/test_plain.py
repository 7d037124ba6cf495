"""Tools as text."""

from __future__ import annotations

from kvboost.chat.plain import uses_tools, with_tools_as_text

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": {"a": "é"}}}
USER = {"role": "user", "content": "Rain?"}


def test_tools_are_introduced_in_a_system_message() -> None:
    first, second = with_tools_as_text([USER], [TOOL])
    assert first["role"] == "system" and '"name": "weather"' in first["content"]
    assert second == USER


def test_calls_and_results_become_text() -> None:
    messages = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "yes", "tool_call_id": "1"},
        {"role": "tool", "content": "no", "tool_call_id": "1"},
        {"role": "assistant", "content": "Both."},
    ]
    assert uses_tools(messages) and not uses_tools([USER])
    shown = with_tools_as_text(messages, [])
    call = '<tool_call>\n{"name": "weather", "arguments": {"a": "é"}}\n</tool_call>'
    assert shown == [
        USER,
        {"role": "assistant", "content": f"{call}\n{call}"},
        {
            "role": "user",
            "content": "<tool_response>\nyes\n</tool_response>\n<tool_response>\nno\n"
            "</tool_response>",
        },
        {"role": "assistant", "content": "Both."},
    ]


def test_parts_stay_parts() -> None:
    image = {"type": "image", "image": b""}
    said = {"type": "text", "text": "Rain?"}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "Be kind."}]},
        {"role": "user", "content": [image, said]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": [{"type": "text", "text": "yes"}], "tool_call_id": "1"},
        {"role": "assistant", "content": [said], "tool_calls": [CALL]},
    ]
    first, second, third, fourth, fifth = with_tools_as_text(messages, [TOOL])
    assert first["content"].startswith("Be kind.\n\n# Tools")
    assert second == {"role": "user", "content": [image, said]}
    assert fourth["content"] == "<tool_response>\nyes\n</tool_response>"
    assert fifth["content"] == [said, {"type": "text", "text": third["content"]}]
