"""Continue: its command ``cn``, its client of OpenAI's API, and what its editor plugins send.

The packages are those of npm. The plugins are not there; their bodies are written down here.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.client_bodies import TOOL, streamed

PACKAGES = Path(sys.prefix) / "node" / "node_modules"
needs_packages = pytest.mark.skipif(
    not PACKAGES.is_dir() or shutil.which("node") is None,
    reason="Continue's packages are not there: install Node.js and run make test-frameworks again",
)
CONFIG = """
name: Local
version: 1.0.0
schema: v1
models:
  - name: kvboost
    provider: openai
    model: {model}
    apiBase: {url}
    apiKey: none
    roles: [chat]
    defaultCompletionOptions: {{maxTokens: 8, temperature: 0}}
"""
CHAT = {"messages": [{"role": "user", "content": "Say something."}], "max_tokens": 8}
"""As ``toChatBody`` in llm/openaiTypeConverters.ts of @continuedev/core 1.1.0 writes it."""
AUTOCOMPLETE = {
    "max_tokens": 8,
    "temperature": 0.01,
    "stream": True,
    "stop": [
        *("<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
        *("<|repo_name|>", "<|file_sep|>", "<|im_start|>", "<|im_end|>"),
        *("/src/", "#- coding: utf-8", "```"),
    ],
    "prompt": (
        "<|fim_prefix|># Path: add.py\ndef add(a, b):\n    return "
        "<|fim_suffix|>\n\nprint(add(1, 2))\n<|fim_middle|>"
    ),
}
"""Autocompletion of Qwen2.5-Coder for the providers openai and vllm, which write the tokens to fill
in the middle themselves: ``_legacystreamComplete`` in llm/llms/OpenAI.ts, ``qwenCoderFimTemplate``
and getStopTokens.ts in autocomplete/templating, @continuedev/core 1.1.0."""


def version_of(package: str) -> str:
    number: str = json.loads((PACKAGES / package / "package.json").read_text())["version"]
    return number


@needs_packages
def test_the_command_answers_and_its_instructions_are_read_once(
    server, knows_every_field, has_run, rows, tmp_path
) -> None:
    """Its system message and tools have some 1,500 tokens, which are the same each time."""
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.format(model=server.model, url=server.url))
    before = rows("exact")
    for question in ("What is a lighthouse for?", "When was it lit?"):
        done = subprocess.run(
            [
                *("node", PACKAGES / "@continuedev/cli/dist/cn.js", "-p", question),
                *("--config", config, "--readonly"),
            ],
            env={
                **os.environ,
                "HOME": str(tmp_path),
                "CONTINUE_GLOBAL_DIR": str(tmp_path / "continue"),
                "CONTINUE_METRICS_ENABLED": "0",
                "CONTINUE_CLI_ENABLE_TELEMETRY": "0",
            },
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0 and done.stdout.strip(), done.stdout + done.stderr
    assert rows("exact") - before > 1_000
    number = version_of("@continuedev/cli")
    has_run("@continuedev/cli", "`cn -p` with its tools, twice; cached tokens", number)


@needs_packages
@pytest.mark.parametrize("provider", ["openai", "vllm"])
def test_the_client_of_continue_gets_what_it_reads(
    server, knows_every_field, has_run, tmp_path, provider
) -> None:
    program = tmp_path / "continue.mjs"
    program.symlink_to(Path(__file__).with_name("continue.mjs"))
    (tmp_path / "node_modules").symlink_to(PACKAGES)
    model = {"model": server.model}
    asked = {
        "provider": provider,
        "apiBase": f"{server.url}/",
        "chat": {**CHAT, **model, "temperature": 0},
        "completion": {**AUTOCOMPLETE, **model},
        "embedding": {**model, "input": ["a lighthouse", "a lamp"]},
        "rerank": {**model, "query": "light", "documents": ["a lighthouse", "a lamp"]},
    }
    got = json.loads(
        subprocess.run(
            ["node", "--preserve-symlinks-main", program, json.dumps(asked)],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=600,
        ).stdout
    )
    (listed,) = got["models"]
    assert listed["id"] == server.model and listed["max_model_len"] == listed["context_length"]
    *chunks, last = got["chunks"]
    said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert said and said == got["whole"]["choices"][0]["message"]["content"]
    assert last["usage"]["completion_tokens"] == got["whole"]["usage"]["completion_tokens"]
    assert last["usage"]["total_tokens"] == got["whole"]["usage"]["total_tokens"]
    assert "".join(chunk["choices"][0]["text"] for chunk in got["completion"])
    assert [len(one["embedding"]) > 100 for one in got["embedded"]["data"]] == [True, True]
    assert [type(one["relevance_score"]) for one in got["ranked"]["data"]] == [float, float]
    number = version_of("@continuedev/openai-adapters")
    what = f"provider {provider}: models, chat, streaming, usage, autocompletion, embeddings"
    has_run("@continuedev/openai-adapters", f"{what}; provider jina: rerank", number)


def test_what_the_plugins_send_is_known(server, knows_every_field, has_run) -> None:
    """The plugins show the text of each chunk, and end at the last."""
    body = {"model": server.model, **AUTOCOMPLETE}
    said = list(streamed(f"{server.url}/completions", body))
    assert "".join(chunk["choices"][0]["text"] for chunk in said)
    body = {"model": server.model, **CHAT, "tools": [TOOL], "parallel_tool_calls": False}
    chunks = list(streamed(f"{server.url}/chat/completions", {**body, "stream": True}))
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"]
    has_run("@continuedev/core", "bodies of its plugins: autocompletion, chat with tools", "1.1.0")
