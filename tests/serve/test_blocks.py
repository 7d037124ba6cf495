"""Answers as blocks."""

from __future__ import annotations

from kvboost.chat.calls import Part
from kvboost.serve.answers.blocks import Blocks


def test_parts_make_blocks() -> None:
    blocks = Blocks()
    parts = [
        Part("reasoning", "h"),
        Part("reasoning", "m"),
        Part("content", "I"),
        Part("call", "now"),
        Part("arguments", "{"),
        Part("arguments", "}"),
        Part("call", "now"),
        Part("content", "\nBye"),
    ]
    steps = [*blocks.feed(parts), *blocks.finish()]
    assert [(block.kind, block.name, block.text) for block in blocks.blocks] == [
        ("reasoning", "", "hm"),
        ("content", "", "I"),
        ("call", "now", "{}"),
        ("call", "now", ""),
        ("content", "", "Bye"),
    ]
    assert [step.step for step in steps if step.block.index == 2] == [
        *("start", "delta", "delta", "stop")
    ]
    assert [step.step for step in steps if step.block.index == 3] == ["start", "stop"]
    assert blocks.text_of("content") == "IBye"


def test_an_empty_answer_may_have_a_block() -> None:
    assert list(Blocks().finish()) == []
    assert [step.step for step in Blocks().finish(never_empty=True)] == ["start", "stop"]
