"""Styles, by what chat templates contain."""

from __future__ import annotations

from kvboost.chat.styles import BARE, TAGGED, ChatStyle
from kvboost.chat.tool_use import reasoning_in


def test_styles_of_templates() -> None:
    assert ChatStyle.of(None) == ChatStyle.of("{{ messages }}") == ChatStyle(TAGGED)
    assert ChatStyle.of("... <tool_call> ... </think>") == ChatStyle(TAGGED, thinks=True)
    assert ChatStyle.of("... Environment: ipython ... parameters").calls is BARE
    assert ChatStyle.of("<tool_call>\n<function=a>").names_parameters


def test_reasoning_after_a_prompt() -> None:
    style = ChatStyle(thinks=True)
    assert reasoning_in("<|im_start|>assistant\n", style) == "possible"
    assert reasoning_in("<|im_start|>assistant\n<think>\n", style) == "begun"
    assert reasoning_in("assistant\n<think>\n\n</think>\n\n", style) == "none"
    assert reasoning_in("assistant\n<think>\n", ChatStyle()) == "none"
