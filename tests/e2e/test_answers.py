"""The model says sensible things: weights, tokenizer and template fit together."""

from __future__ import annotations

import subprocess
import sys

from kvboost import GenerationMode

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def test_a_chat_is_answered_and_continued(smollm) -> None:
    first = smollm.chat(QUESTION, 24, GenerationMode.PREFIX_CACHE, cache_salt="answers")
    assert "Paris" in first.output_text
    assert first.finish_reason == "stop"
    messages = [
        *QUESTION,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And of Italy?"},
    ]
    second = smollm.chat(messages, 24, GenerationMode.PREFIX_CACHE, cache_salt="answers")
    assert "Rome" in second.output_text
    assert second.kv_reuse_ratio > 0.6


def test_the_command_line_answers_in_a_process_of_its_own() -> None:
    command = [sys.executable, "-m", "kvboost", "generate", QUESTION[0]["content"]]
    done = subprocess.run(
        [*command, "--max-new-tokens", "12"], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "% reused" in done.stdout
