"""What the tools of a request mean for its answer."""

from __future__ import annotations

import json

import pytest

from kvboost.chat.styles import BARE, ChatStyle
from kvboost.chat.tool_use import ToolUse, tool_use
from kvboost.errors import ConfigError
from kvboost.structured.formats import choice_grammar

TOOLS = [{"type": "function", "function": {"name": name}} for name in ("weather", "now")]
STRICT = [{"type": "function", "function": {"name": "weather", "strict": True}}]


def rules(use: ToolUse, answer: str | None = None, reasoning="none") -> str:
    grammar = use.grammar(ChatStyle(), answer, reasoning)
    assert grammar is not None
    return "\n".join(one.get("lark_grammar", "") for one in json.loads(grammar)["grammars"])


def test_free_answers_have_no_grammar() -> None:
    for use in (ToolUse(), ToolUse(TOOLS), ToolUse(STRICT, "none")):
        assert use.grammar(ChatStyle(), None, "none") is None


def test_no_tools_are_offered_if_none_may_be_called() -> None:
    use = tool_use(TOOLS, "none")
    assert use.offered == () and use.names == frozenset()
    assert use.grammar(ChatStyle(), choice_grammar(["a"]), "none") == choice_grammar(["a"])


def test_a_named_tool_is_the_only_one_in_the_grammar() -> None:
    use = tool_use(TOOLS, "now")
    assert len(use.offered) == 2 and "now" in rules(use) and "weather" not in rules(use)
    assert "weather" in rules(tool_use(TOOLS, "required"))


def test_strict_tools_have_a_grammar() -> None:
    assert "lazy" in rules(ToolUse(STRICT))


def test_tools_and_a_format() -> None:
    assert "@calls | @answer" in rules(ToolUse(TOOLS), choice_grammar(["a"]))


def test_reasoning_comes_before_forced_calls() -> None:
    assert "thought" in rules(tool_use(TOOLS, "required"), reasoning="begun")


def test_a_single_call_ends_at_its_tag() -> None:
    single = ToolUse(TOOLS, parallel=False)
    assert single.stops(ChatStyle(), None) == ["</tool_call>"]
    assert single.stops(ChatStyle(), "a grammar") == single.stops(ChatStyle(BARE), None) == []
    assert ToolUse(TOOLS).stops(ChatStyle(), None) == []


@pytest.mark.parametrize(
    ("tools", "choice", "said"),
    [
        (["weather"], "auto", "tools: 'weather' must be like"),
        ([{"name": "weather"}], "auto", "must be like"),
        (TOOLS, "rain", "tool_choice='rain' must be .* the tools are weather, now"),
        ([], "required", "tool_choice='required' needs tools"),
    ],
)
def test_wrong_tools_say_what_is_wrong(tools, choice: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        tool_use(tools, choice)
