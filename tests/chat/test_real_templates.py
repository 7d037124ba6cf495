"""Agents' conversations in the chat templates of real models, which rewrite the history: when the
user asks again, most of them leave out the reasoning of the turn before."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvboost import KVBoost, SpanKind
from kvboost.chat.context_edits import CLEARED, TOOL_USES
from kvboost.results import GenerationResult
from kvboost.tokens.prompt import Conversation
from support.chat_templates import tokenizer_with
from support.prompts import BASELINE, EXACT
from support.tiny import tiny_model

TEMPLATES = Path(__file__).parent / "templates"
REASONING = ["Qwen3-0.6B", "GLM-4.6", "gpt-oss-120b"]
"""Templates that write the reasoning between the calls of the last turn."""
PLAIN = "DeepSeek-V3.1"
ALL = [*REASONING, PLAIN]
SEAM = 32
"""Rows of known text that may be computed at a seam: a shorter run is not moved."""
SLOPPY: dict[str, Any] = {"recompute_strategy": "none", "ignore_eos": True, "heal": "idle"}
FULL: dict[str, Any] = {**SLOPPY, "recompute_strategy": "query", "recompute_ratio": 1.0}
TOOL = {
    "type": "function",
    "function": {
        "name": "read_log",
        "description": "The log of one night",
        "parameters": {"type": "object", "properties": {"night": {"type": "integer"}}},
    },
}
SYSTEM = {"role": "system", "content": "You keep the log of a lighthouse and answer questions. "}
QUESTION = {"role": "user", "content": "Which ships passed in the first nights? Read the logs."}
RESULTS = [
    "".join(f"Ship {31 * night + 7 * n} passed at {n} in night {night}. " for n in range(6))
    for night in range(3)
]
THOUGHTS = [
    f"I read the log of night {night} next, because it may name more." for night in range(3)
]
ANSWER = {
    "role": "assistant",
    "content": "The ships of the three logs passed, six of them in each night.",
    "reasoning_content": "Now I have read all of the logs, and can say which ships passed.",
}
NEXT = {"role": "user", "content": "And which of them passed twice? Give me the numbers only."}
STEPS: list[dict[str, Any]] = [
    message
    for night in range(3)
    for message in (
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": THOUGHTS[night],
            "tool_calls": [
                {
                    "id": f"call-{night}",
                    "type": "function",
                    "function": {"name": "read_log", "arguments": {"night": night}},
                }
            ],
        },
        {"role": "tool", "tool_call_id": f"call-{night}", "content": RESULTS[night]},
    )
]
LOOP = [SYSTEM, QUESTION, *STEPS]
THOUGHT = ANSWER["reasoning_content"]
WRITTEN = {
    "Qwen3-0.6B": f"<think>\n{THOUGHT}\n</think>\n\n{ANSWER['content']}<|im_end|>",
    "GLM-4.6": f"\n<think>{THOUGHT}</think>\n{ANSWER['content']}",
    "gpt-oss-120b": (
        f"<|channel|>analysis<|message|>{THOUGHT}<|end|>"
        f"<|start|>assistant<|channel|>final<|message|>{ANSWER['content']}<|return|>"
    ),
    PLAIN: ANSWER["content"],
}
"""What the model itself writes at the end of ``LOOP``."""


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, KVBoost]]:
    model = tiny_model("llama", max_position_embeddings=4096)
    options = {"chunk_size": 16, "reuse_moved": "always", "speculate": "off"}
    made = {
        name: KVBoost.from_model(
            model, tokenizer_with((TEMPLATES / f"{name}.jinja").read_text()), **options
        )
        for name in ALL
    }
    yield made
    for engine in made.values():
        assert engine.check_integrity() == []
        engine.close()


def render(engine: KVBoost, messages: list[dict[str, Any]], **more: Any) -> str:
    return engine.render(Conversation(messages, [TOOL], **more))


def num_rows(result: GenerationResult, *kinds: SpanKind) -> int:
    return sum(span.num_tokens for span in result.spans if span.kind in kinds)


def check_full(engine: KVBoost, prompt: str, salt: str) -> None:
    """With all moved rows computed again, an answer is that of a full prefill."""
    moved = engine.generate(prompt, 6, **FULL, cache_salt=salt, keep=False)
    full = engine.generate(prompt, 6, BASELINE, ignore_eos=True)
    assert moved.moved_tokens > 0 and moved.token_ids == full.token_ids


def play_loop(engine: KVBoost, name: str, salt: str) -> None:
    """The turn until the model has answered: every step continues the one before, but for the
    blanks around what opens an answer."""
    texts = [render(engine, LOOP[: 2 + 2 * step]) for step in range(len(STEPS) // 2 + 1)]
    texts.append(texts[-1] + WRITTEN[name])
    for before, text in zip(["", *texts], texts, strict=False):
        result = engine.generate(text, 1, EXACT, cache_salt=salt, ignore_eos=True)
        assert result.exact_tokens >= len(before.encode()) - 16


@pytest.mark.parametrize("name", ALL)
def test_what_a_template_writes_of_reasoning(engines, name: str) -> None:
    engine = engines[name]
    looping, asked = render(engine, LOOP), render(engine, [*LOOP, ANSWER, NEXT])
    assert [thought in looping for thought in THOUGHTS] == [name in REASONING] * 3
    assert not any(one in asked for one in (*THOUGHTS, THOUGHT))
    for text in (*RESULTS, ANSWER["content"], NEXT["content"], "read_log"):
        assert text in asked


@pytest.mark.parametrize("name", REASONING)
def test_history_whose_reasoning_vanished_is_moved(engines, name: str) -> None:
    """The next turn computes no more rows than what the user says and the template around it:
    nothing beside the four reasonings that are gone. The turn after it finds everything in place:
    approximate rows at first, and exact ones once the conversation has been healed."""
    engine, salt = engines[name], "dropped"
    play_loop(engine, name, salt)
    asked = render(engine, [*LOOP, ANSWER, NEXT])
    check_full(engine, asked, salt)
    result = engine.generate(asked, 2, **SLOPPY, cache_salt=salt)
    first = asked.index(QUESTION["content"]) + len(QUESTION["content"])
    new = len(asked) - asked.index(ANSWER["content"]) - len(ANSWER["content"])
    computed = num_rows(result, SpanKind.COMPUTE)
    assert result.exact_tokens >= first
    assert computed <= new
    assert num_rows(result, SpanKind.MOVED) == len(asked) - result.exact_tokens - computed
    assert num_rows(result, SpanKind.APPROXIMATE) == 0
    said = {"role": "assistant", "content": "14 and 38."}
    again = render(engine, [*LOOP, ANSWER, NEXT, said, QUESTION])
    new = len(again) - again.index(NEXT["content"]) - len(NEXT["content"])
    before = engine.generate(again, 1, **SLOPPY, cache_salt=salt, keep=False)
    assert before.exact_tokens + before.approximate_tokens >= len(again) - new
    assert before.approximate_tokens > len(again) / 2
    engine.heal()
    assert result.healing.status == "done"
    after = engine.generate(again, 1, **SLOPPY, cache_salt=salt, keep=False)
    assert after.exact_tokens >= len(again) - new and after.approximate_tokens == 0


def test_a_template_without_reasoning_continues_exactly(engines) -> None:
    engine, salt = engines[PLAIN], "plain"
    play_loop(engine, PLAIN, salt)
    asked = render(engine, [*LOOP, ANSWER, NEXT])
    result = engine.generate(asked, 2, **SLOPPY, cache_salt=salt)
    before, answer, _ = asked.partition(ANSWER["content"])
    assert result.exact_tokens >= len((before + answer).encode())


@pytest.mark.parametrize("name", ALL)
def test_history_behind_a_cleared_result_is_moved(engines, name: str) -> None:
    """The first of three results is cleared while the model works on."""
    engine, salt = engines[name], "cleared"
    play_loop(engine, name, salt)
    edit = {
        "type": TOOL_USES,
        "trigger": {"type": "tool_uses", "value": 2},
        "keep": {"type": "tool_uses", "value": 2},
    }
    whole = render(engine, LOOP)
    edited = whole.replace(RESULTS[0], CLEARED)
    check_full(engine, edited, salt)
    result = engine.chat(
        LOOP, 2, tools=[TOOL], context_management={"edits": [edit]}, cache_salt=salt, **SLOPPY
    )
    assert [one.cleared_tool_uses for one in result.applied_edits] == [1]
    assert result.prompt_tokens == len(edited.encode())
    prefix = len(whole.partition(RESULTS[0])[0].encode())
    computed = num_rows(result, SpanKind.COMPUTE)
    assert result.exact_tokens >= prefix and computed <= len(CLEARED) + 2 * SEAM
    assert result.moved_tokens == result.prompt_tokens - result.exact_tokens - computed


def test_an_empty_reasoning_that_vanishes_moves_the_last_answer_alone(engines) -> None:
    """Without thinking, Qwen 3's template opens an answer with an empty reasoning, and leaves it
    out of the history. What precedes the last answer stays in place at every step."""
    engine, salt = engines["Qwen3-0.6B"], "silent"
    plain = [{k: v for k, v in one.items() if k != "reasoning_content"} for one in LOOP]
    opened, call = "<think>\n\n</think>\n\n", "<|im_start|>assistant\n<tool_call>"
    for step in range(3):
        prompt, after = (
            render(engine, plain[: 2 + 2 * one], template_options={"enable_thinking": False})
            for one in (step, step + 1)
        )
        head = prompt.removesuffix(opened)
        assert head != prompt and opened not in head and after.startswith(head)
        result = engine.generate(prompt, 1, **SLOPPY, cache_salt=salt)
        if step:
            assert result.exact_tokens >= prompt.rindex(call)
            new = len(RESULTS[step - 1]) + len(opened)
            assert num_rows(result, SpanKind.COMPUTE) <= new + 100
            engine.heal()
        engine.generate(
            prompt + after[len(head) :].partition("<|im_end|>")[0], 1, EXACT, cache_salt=salt
        )
