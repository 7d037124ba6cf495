from __future__ import annotations

import math

import pytest

from kvboost.bench.agent.checks import Action, Check, action, divergence, same_action
from kvboost.bench.serve.clients import SOURCES, Answer


@pytest.mark.parametrize(
    ("text", "expected", "is_whole"),
    [
        ("I look.\n<tool_call>\n{}\n</tool_call> done", "{}", True),
        ("I look.\n```bash\nls\n```\nThen", "ls", True),
        ("```bash\nls -", "ls -", False),
        ("```bash\n", "", False),
        ('{"name": "ls",\n "arguments": {}}\nrest', '{"name": "ls",\n "arguments": {}}', True),
        ('{\n "name": "l', '{\n "name": "l', False),
        ("<think>perhaps\n```\nrm\n```\n</think>\n```\nls\n```", "ls", True),
    ],
)
def test_an_action_is_a_call_a_block_or_an_object(text: str, expected: str, is_whole: bool) -> None:
    assert action(text) == Action(expected, is_whole)


@pytest.mark.parametrize(
    "text", ["", "<format_example>\nTHOUGHT: I look", "<think>perhaps\n```\nrm\n```\n"]
)
def test_words_and_reasoning_are_no_action(text: str) -> None:
    assert action(text) is None


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("```\nls\n```", "So:\n```\nls\n```", True),
        ("```\nls\n```", "```\nls -l\n```", False),
        ("```\nls -l\n```", "I look into it:\n```\nls", True),  # cut off
        ("```\nls\n```", "```\nls -l", False),  # it goes on
        ("```\nls /usr", "```\nls /us", True),
        ("```\nls /usr", "```\ncat", False),
        ("```\nls\n```", "I look", False),
        ("I look", "So I look", None),
        ("```\nls", "I look:\n```bash\n", None),
    ],
)
def test_actions_are_compared_as_far_as_both_go(one: str, other: str, expected: bool) -> None:
    assert same_action(action(one), action(other)) is expected
    assert same_action(action(other), action(one)) is expected


def test_divergence_is_that_of_the_shared_tokens_and_the_rest() -> None:
    full = {"a": math.log(0.5), "b": math.log(0.25), "c": math.log(0.125)}
    other = {"a": math.log(0.25), "b": math.log(0.25), "d": math.log(0.4)}
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.25 / 0.5)
    assert divergence(full, other) == pytest.approx(expected)
    assert divergence(full, full) == 0.0
    assert divergence({"a": 0.0}, {"a": 0.0}) == 0.0


def test_a_check_compares_action_and_text_and_says_what_was_reused() -> None:
    rows = dict.fromkeys(SOURCES, 0) | {"computed": 10}
    full = Answer(0.0, text="```\nls\n```\nand more", rows=rows, first_logprobs={"ls": 0.0})
    reused = Answer(0.0, text="```\nls\n```\nno more", moved_tokens=4, first_logprobs={"ls": 0.0})
    check = Check.of("coder", 3, full, reused)
    assert check == Check("coder", 3, 4, 0, 0.0, same_action=True, same_text=False)
    full.rows["exact"] = 2
    assert Check.of("coder", 3, full, reused).full_reused_tokens == 2
