from __future__ import annotations

import math

import pytest

from kvboost.bench.load.agent.checks import Check, action, divergence
from kvboost.bench.load.serve.clients import SOURCES, Answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I look.\n<tool_call>\n{}\n</tool_call> done", "<tool_call>\n{}\n</tool_call>"),
        ("I look.\n```bash\nls\n```\nThen", "```bash\nls\n```"),
        ("```bash\nls -", "```bash\nls -"),
        ('{"name": "ls",\n "arguments": {}}\nrest', '{"name": "ls",\n "arguments": {}}'),
        ('{\n "name": "l', '{\n "name": "l'),
        ("\n\nFirst line. \nSecond", "First line."),
        ("", ""),
    ],
)
def test_an_action_is_a_call_a_block_or_the_first_line(text: str, expected: str) -> None:
    assert action(text) == expected


def test_divergence_is_that_of_the_shared_tokens_and_the_rest() -> None:
    full = {"a": math.log(0.5), "b": math.log(0.25), "c": math.log(0.125)}
    other = {"a": math.log(0.25), "b": math.log(0.25), "d": math.log(0.4)}
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.25 / 0.5)
    assert divergence(full, other) == pytest.approx(expected)
    assert divergence(full, full) == 0.0
    assert divergence({"a": 0.0}, {"a": 0.0}) == 0.0


def test_a_check_compares_action_and_text_and_says_what_was_reused() -> None:
    rows = dict.fromkeys(SOURCES, 0) | {"computed": 10}
    full = Answer(0.0, text="ls\nand more", rows=rows, first_logprobs={"ls": 0.0})
    reused = Answer(0.0, text="ls\nno more", moved_tokens=4, first_logprobs={"ls": 0.0})
    check = Check.of("coder", 3, full, reused)
    assert check == Check("coder", 3, 4, 0, 0.0, same_action=True, same_text=False)
    full.rows["exact"] = 2
    assert Check.of("coder", 3, full, reused).full_reused_tokens == 2
